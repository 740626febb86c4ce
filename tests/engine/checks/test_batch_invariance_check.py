"""--deterministic: the startup check passes where rows are independent, and fails where they are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import nextafter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.common.ipc import WorkerConfig
from app.common.types import Chunk, TokenScore
from app.engine.checks.batch_invariance_check import BatchVarianceError, DeviceUnderTest, check_batch_invariance
from app.engine.execution.engine import Engine
from app.engine.execution.runner import Runner, TorchExecutor
from app.engine.sampling.sampler_io import SampledToken
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


Break = Callable[[Tensor], Tensor]


def _by_row(logits_SV: Tensor) -> Tensor:
    """The row's index in the step leaks: a row depends on the rows before it."""
    logits_SV[:, ::2] += 1e-3 * torch.arange(len(logits_SV))[:, None]
    return logits_SV


def _by_number(logits_SV: Tensor) -> Tensor:
    """One last bit, and only where there are many rows: another tile of a library's product."""
    return logits_SV if len(logits_SV) < 8 else logits_SV * torch.tensor(1 + 2**-23)


def _beyond_all(logits_SV: Tensor) -> Tensor:
    return logits_SV.fill_(float("nan"))


def _break_compute(monkeypatch: pytest.MonkeyPatch, break_it: Break) -> None:
    whole = TorchExecutor.logits
    monkeypatch.setattr(TorchExecutor, "logits", lambda self, rows: break_it(whole(self, rows)))


@pytest.mark.parametrize("break_it", [_by_row, _by_number])
def test_rows_that_see_their_neighbours_are_found_out(break_it: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    _break_compute(monkeypatch, break_it)
    message = r"cannot be guaranteed .*: computed .*, the prompt of \d+ tokens gives another .* and alone .*without it"
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


def test_a_score_that_is_off_by_its_last_bit_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Runner._score

    def shifted(self: Runner, chunks: list[Chunk]) -> dict[str, tuple[TokenScore, ...] | None]:
        scores = whole(self, chunks)
        if len(chunks) < 3:
            return scores
        return {name: tuple((nextafter(own, 0), top) for own, top in each or ()) for name, each in scores.items()}

    monkeypatch.setattr(Runner, "_score", shifted)
    with pytest.raises(BatchVarianceError, match="the log-probability of its token 2 is"):
        check_batch_invariance(_device())


def test_a_draw_that_hangs_on_its_neighbours_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where logits are right and tokens are not."""
    whole = Runner._draw

    def shifted(self: Runner, chunks: list[Chunk]) -> dict[str, SampledToken]:
        drawn = whole(self, chunks)
        return drawn if len(drawn) < 3 else {name: replace(each, token=5) for name, each in drawn.items()}

    monkeypatch.setattr(Runner, "_draw", shifted)
    with pytest.raises(BatchVarianceError, match=r"token 1 after it is 5 \(.*\) and alone \d+"):
        check_batch_invariance(_device())


def test_logits_that_are_not_finite_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _break_compute(monkeypatch, _beyond_all)
    with pytest.raises(BatchVarianceError, match="cannot be verified on this device"):
        check_batch_invariance(_device())


def _config(weights: Path, **changes: object) -> WorkerConfig:
    config = WorkerConfig(weights=str(weights), device="cpu", dtype="float32", kernels="torch", threads=1, kv_blocks=32)
    return WorkerConfig(**{name: getattr(config, name) for name in config.__struct_fields__} | changes)  # type: ignore[arg-type]


def test_the_engine_tells_of_the_trial_where_it_is_asked_for(weights: Path) -> None:
    logged: list[str] = []
    assembled = build_engine(_config(weights, deterministic=True), logged.append)
    assert any(each.startswith("batch invariance verified") for each in logged)
    assert assembled.ready.numerics == "torch-float32", "a CPU computes no otherwise"
    assert not assembled.engine.has_work and assembled.engine.scheduler.counters.blocks_active == 0


def test_the_engine_does_not_start_where_the_promise_cannot_be_kept(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_compute(monkeypatch, _by_row)
    build_engine(_config(weights))
    with pytest.raises(EngineStartError, match=r"^--deterministic cannot be guaranteed on this device: "):
        build_engine(_config(weights, deterministic=True))


def test_the_engine_refuses_fp8_on_a_cpu(weights: Path) -> None:
    with pytest.raises(
        EngineStartError, match=r"^--quantize fp8 requires a GPU, and the device is cpu: use --quantize int8 or none$"
    ):
        build_engine(_config(weights, quantize="fp8"))
