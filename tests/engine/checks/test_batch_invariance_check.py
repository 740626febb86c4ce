"""--deterministic: the startup check passes where rows are independent, and fails where they are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nextafter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from app.common.ipc import WorkerConfig
from app.common.types import SampledToken, TokenScore
from app.engine.checks.batch_invariance_check import BatchVarianceError, DeviceUnderTest, check_batch_invariance
from app.engine.execution.engine import Engine
from app.engine.execution.runner import Runner, TorchExecutor
from app.engine.scheduling.block_allocator import BlockPool
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from app.engine.startup import build_engine
from app.engine.worker_loop import EngineStartError
from model.config import ModelConfig
from tests.support.model.tiny_models import tiny_config, tiny_decoder, tiny_engine

LIMITS = StepLimits(tokens_per_step=128, max_running=12, prompt_tokens_with_decodes=32)
pytestmark = pytest.mark.usefixtures("one_thread")


def _device(shape: ModelConfig | None = None, limits: StepLimits = LIMITS, seed: int = 0) -> DeviceUnderTest:
    shape = shape or tiny_config()
    runner = tiny_engine(tiny_decoder(shape, seed=seed), max_running=limits.max_running).runner
    return DeviceUnderTest(
        make_engine=lambda most: Engine(Scheduler(most, BlockPool(64, 16)), runner),
        limits=limits,
        context=shape.context,
        vocab_size=shape.vocab_size,
        has_encoder=shape.n_encoder_layers > 0,
    )


def test_the_kernels_of_a_cpu_pass(way: str) -> None:
    assert check_batch_invariance(_device()).startswith("batch invariance verified: 155 log-probabilities equal"), way


@pytest.mark.parametrize("limits", [LIMITS, replace(LIMITS, max_running=1), replace(LIMITS, tokens_per_step=12)])
def test_the_trial_keeps_to_the_limits_it_is_given(limits: StepLimits) -> None:
    given: list[StepLimits] = []
    device = _device(limits=limits)

    def make(most: StepLimits) -> Engine:
        given.append(most)
        return device.make_engine(most)

    check_batch_invariance(replace(device, make_engine=make))
    assert all(most.max_running <= limits.max_running for most in given)
    assert all(most.tokens_per_step <= limits.tokens_per_step for most in given)


def test_a_model_with_an_encoder_and_a_short_context_is_tried_too() -> None:
    check_batch_invariance(_device(tiny_config(n_encoder_layers=1)))
    check_batch_invariance(_device(tiny_config(context=4)))


def _by_row(logits_SV: Tensor) -> Tensor:
    """The row's index in the step leaks: a row depends on the rows before it."""
    logits_SV[:, ::2] += 1e-3 * torch.arange(len(logits_SV))[:, None]
    return logits_SV


def _by_number(logits_SV: Tensor) -> Tensor:
    """One last bit, and only where there are many rows: another tile of a library's product."""
    return logits_SV if len(logits_SV) < 8 else logits_SV * torch.tensor(1 + 2**-23)


def _beyond_all(logits_SV: Tensor) -> Tensor:
    return logits_SV.fill_(float("nan"))


def _last_bit(scores: dict[str, tuple[TokenScore, ...] | None]) -> dict[str, tuple[TokenScore, ...] | None]:
    return {name: tuple((nextafter(own, 0), top) for own, top in each or ()) for name, each in scores.items()}


def _other_token(drawn: dict[str, SampledToken]) -> dict[str, SampledToken]:
    """Where logits are right and tokens are not."""
    return drawn if len(drawn) < 3 else {name: replace(each, token=5) for name, each in drawn.items()}


def _break(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, break_it: Callable[[Any], Any]) -> None:
    whole = getattr(owner, name)

    def broken(self: Any, rows: Sequence[Any]) -> Any:
        result = whole(self, rows)
        return result if name == "_score" and len(rows) < 3 else break_it(result)

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize(
    ("owner", "name", "break_it", "message"),
    [
        (TorchExecutor, "logits", _by_row, r"cannot be guaranteed .* another result.* and alone .*; start without it"),
        (TorchExecutor, "logits", _by_number, r"cannot be guaranteed .*: computed .*, the prompt of \d+ tokens gives"),
        (TorchExecutor, "logits", _beyond_all, "cannot be verified on this device"),
        (Runner, "_score", _last_bit, "the log-probability of its token 2 is"),
        (Runner, "_draw", _other_token, r"token 1 after it is 5 \(.*\) and alone \d+"),
    ],
)
def test_rows_that_see_their_neighbours_are_found_out(
    owner: type, name: str, break_it: Callable[[Any], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break(monkeypatch, owner, name, break_it)
    with pytest.raises(BatchVarianceError, match=message):
        check_batch_invariance(_device())


@pytest.mark.parametrize(
    ("index", "way"),
    [(4, "together with others"), (5, "in another order"), (6, "in small chunks"), (7, "in a batch of 12")],
)
def test_every_way_is_compared(index: int, way: str) -> None:
    """Four prompts are computed alone, each by an engine of its own; one engine behind them has other weights."""
    device, other = _device(), _device(seed=1)
    made: list[Engine] = []

    def make(most: StepLimits) -> Engine:
        made.append((other if len(made) == index else device).make_engine(most))
        return made[-1]

    with pytest.raises(
        BatchVarianceError, match=f"device: computed {way}, the prompt of 3 tokens gives another result"
    ):
        check_batch_invariance(replace(device, make_engine=make))


def test_the_engine_does_not_start_where_the_promise_cannot_be_kept(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = WorkerConfig(weights=str(weights), device="cpu", dtype="float32", kernels="torch", threads=1, kv_blocks=32)
    logged: list[str] = []
    build_engine(msgspec.structs.replace(config, deterministic=True), logged.append)
    assert any(each.startswith("batch invariance verified") for each in logged)
    _break(monkeypatch, TorchExecutor, "logits", _by_row)
    build_engine(config)
    with pytest.raises(EngineStartError, match=r"^--deterministic cannot be guaranteed on this device: "):
        build_engine(msgspec.structs.replace(config, deterministic=True))
