"""Checks before the first request: golden.json and finite logits in any number format; batch invariance."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nextafter
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch
from torch import Tensor

from app.common.ipc import WorkerConfig
from app.common.types import Request, RequestStarted, TokenScore
from app.engine.execution.engine import Engine
from app.engine.execution.runner import Runner
from app.engine.execution.torch_executor import TorchExecutor
from app.engine.sampling.sampled_token import SampledToken
from app.engine.scheduling.block_pool import BlockPool
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from app.engine.startup import build_engine
from app.engine.startup_checks import BatchVarianceError, check_batch_invariance, check_finite_logits, check_golden
from app.engine.worker_loop import EngineStartError
from model.cache_formats import KvCache
from model.checkpoint.golden import GOLDEN_FILE
from model.checkpoint.golden_export import golden_file
from model.checkpoint.manifest import MANIFEST_FILE, manifest_file
from model.config import ModelConfig, Rope
from model.files import CheckpointError, write_files
from model.quantize import QuantizedKind
from tests.support.model.bad_weights import bad_weights, good_weights
from tests.support.model.tiny_models import CPU_QUANTIZE, tiny_config, tiny_decoder, tiny_engine, tiny_files

PROMPT = [random.Random(3).randrange(1, 320) for _ in range(40)]
NUMBERS = ["float32", "bfloat16", *CPU_QUANTIZE[1:]]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def directory(tmp_path: Path, weights: Path) -> Path:
    """The tiny weights with a golden.json."""
    copy = Path(shutil.copytree(weights, tmp_path / "golden"))
    (copy / GOLDEN_FILE).write_bytes(golden_file(tiny_decoder(), PROMPT))
    return copy


def _config(
    directory: Path, number: str, kernels: str = "torch", library: Path | None = None, kv_cache: KvCache = "auto"
) -> WorkerConfig:
    return WorkerConfig(
        weights=str(directory),
        device="cpu",
        dtype="float32" if number == "float32" else "bfloat16",
        quantize=number if number in CPU_QUANTIZE else "none",  # type: ignore[arg-type]
        kv_cache=kv_cache,
        kernels=kernels,  # type: ignore[arg-type]
        library=str(library) if library else None,
        threads=1,
        kv_blocks=32,
    )


def _announced(config: WorkerConfig) -> list[str]:
    logged: list[str] = []
    build_engine(config, logged.append)
    return logged


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("number", NUMBERS)
def test_every_backend_passes_the_golden_check(
    directory: Path, number: str, kernels: str, request: pytest.FixtureRequest
) -> None:
    library = request.getfixturevalue("native_library") if kernels == "native" else None
    logged = _announced(_config(directory, number, kernels, library))[-1]
    assert logged.startswith(f"{GOLDEN_FILE} passed, {'largest' if number == 'float32' else 'mean'} difference")


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("number", NUMBERS)
def test_int8_cache_passes_the_golden_check(
    directory: Path, number: str, kernels: str, request: pytest.FixtureRequest
) -> None:
    library = request.getfixturevalue("native_library") if kernels == "native" else None
    logged = _announced(_config(directory, number, kernels, library, "int8"))[-1]
    assert logged.startswith(f"{GOLDEN_FILE} passed, mean difference")


@pytest.mark.parametrize("kv_cache", get_args(KvCache))
@pytest.mark.parametrize("number", NUMBERS)
def test_different_model_is_detected_in_every_number_format(directory: Path, number: str, kv_cache: KvCache) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 5.0}))
    with pytest.raises(EngineStartError, match=r"golden\.json: the log-probabilities differ by (up to|a mean of) \d"):
        build_engine(_config(directory, number, kv_cache=kv_cache))


def test_golden_longer_than_the_served_context_is_compared_as_far_as_that(directory: Path) -> None:
    config = msgspec.structs.replace(_config(directory, "float32"), max_context=len(PROMPT) // 2)
    assert _announced(config)[-1].startswith(f"{GOLDEN_FILE} passed")


@pytest.mark.parametrize(("context", "result"), [(0, "passed"), (65, "passed"), (64, "has the long_factors")])
def test_golden_is_not_compared_with_the_other_factors_of_a_longrope(tmp_path: Path, context: int, result: str) -> None:
    factors = {"short_factors": (1.0,) * 8, "long_factors": tuple(2.0 + pair for pair in range(8))}
    shape = tiny_config(rope=Rope(kind="longrope", original_context=64, **factors))
    write_files(tmp_path, tiny_files(tiny_decoder(shape), PROMPT))
    config = msgspec.structs.replace(_config(tmp_path, "float32"), max_context=context)
    assert _announced(config)[-1].startswith(f"{GOLDEN_FILE} {result}")


def test_incomplete_set_of_files_is_refused(directory: Path, weights: Path) -> None:
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    (directory / MANIFEST_FILE).write_bytes(manifest_file(files))
    assert _announced(_config(directory, "float32"))[-1].endswith(f", {MANIFEST_FILE} passed")
    assert _announced(_config(weights, "float32"))[-1] == f"no {GOLDEN_FILE}, which is optional"
    (directory / "generation_config.json").write_text("{}")
    with pytest.raises(EngineStartError, match=r"generation_config\.json: differs from manifest\.json"):
        build_engine(_config(directory, "float32"))


@pytest.mark.parametrize(
    ("n_encoder_layers", "context", "result"),
    [(0, 256, "passed"), (1, 256, "passed"), (0, 20, "passed"), (0, 1, "max-context"), (1, 20, "max-context")],
)
def test_golden_check_leaves_the_engine_idle_with_a_separate_cache(
    tmp_path: Path, n_encoder_layers: int, context: int, result: str
) -> None:
    """A short context uses as much of the prompt as fits, but an encoder needs all of it."""
    shape = tiny_config(n_encoder_layers=n_encoder_layers)
    decoder = tiny_decoder(shape)
    engine = tiny_engine(decoder)
    (tmp_path / GOLDEN_FILE).write_bytes(golden_file(decoder, PROMPT))
    check_finite_logits(engine, tmp_path, shape, context=context, number_format="float32", start_id=0)
    assert result in check_golden(engine, tmp_path, shape, context=context, number_format="float32")
    assert not engine.has_work and not engine.scheduler.violations()
    assert engine.scheduler.counters.blocks_active == 0
    source = tuple(PROMPT) if n_encoder_layers else ()
    engine.add(Request(id="the same text", prompt=tuple(PROMPT), max_tokens=1, source=source))
    started: list[RequestStarted] = []
    engine.step(started.extend)
    assert [one.cached_tokens for one in started] == [0]


def test_non_finite_logits_fail_the_golden_check(tmp_path: Path) -> None:
    (tmp_path / GOLDEN_FILE).write_bytes(golden_file(tiny_decoder(), PROMPT))
    spoilt = tiny_decoder()
    spoilt.embedding[PROMPT[3]] = float("nan")
    with pytest.raises(CheckpointError, match=r"golden\.json: .*(not finite)"):
        check_golden(tiny_engine(spoilt), tmp_path, tiny_config(), context=256, number_format="float32")


@pytest.fixture
def exploding(tmp_path: Path) -> Path:
    """Finite weights without a golden.json whose activations are not finite."""
    return bad_weights(tmp_path / "bad", good_weights(tmp_path / "good", 0), "numbers that explode")


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("number", NUMBERS)
def test_weights_with_non_finite_logits_are_refused_in_every_number_format(
    exploding: Path, number: str, kernels: str, request: pytest.FixtureRequest
) -> None:
    library = request.getfixturevalue("native_library") if kernels == "native" else None
    is_packed = number in get_args(QuantizedKind)
    message = (
        rf"^--quantize {number}: \S+ has .* as its largest number"
        if is_packed
        else (rf"model\.safetensors: .* are not finite in {number}")
    )
    with pytest.raises(EngineStartError, match=message) as refusal:
        build_engine(_config(exploding, number, kernels, library))
    assert ("serve them with --dtype float32" in str(refusal.value)) == (number == "bfloat16")
    assert ("use --quantize none" in str(refusal.value)) == is_packed


LIMITS = StepLimits(tokens_per_step=128, max_running=12, prompt_tokens_with_decodes=32)


def _check(
    shape: ModelConfig | None = None, limits: StepLimits = LIMITS, *, other: int | None = None
) -> list[StepLimits]:
    """Runs the check; returns the limits of its engines. The engine with index `other` has other weights."""
    shape, given = shape or tiny_config(), list[StepLimits]()
    runners = [tiny_engine(tiny_decoder(shape, seed=seed), max_running=limits.max_running).runner for seed in range(2)]

    def make(most: StepLimits) -> Engine:
        given.append(most)
        return Engine(Scheduler(most, BlockPool(64, 16)), runners[len(given) - 1 == other])

    result = check_batch_invariance(make, limits, shape, context=shape.context)
    assert result.startswith("batch invariance verified: ")
    return given


@pytest.mark.parametrize("limits", [LIMITS, replace(LIMITS, max_running=1), replace(LIMITS, tokens_per_step=12)])
def test_cpu_kernels_pass_within_the_limits_of_the_engine(limits: StepLimits, way: str) -> None:
    given = _check(limits=limits)
    assert all(most.max_running <= limits.max_running for most in given), way
    assert all(most.tokens_per_step <= limits.tokens_per_step for most in given)


@pytest.mark.parametrize("change", [{"n_encoder_layers": 1}, {"context": 4}])
def test_models_with_an_encoder_or_a_short_context_are_checked(change: dict[str, int]) -> None:
    _check(tiny_config(**change))


def _by_row(logits_SV: Tensor) -> Tensor:
    """A leak of the row's index in the step: a row depends on the rows before it."""
    logits_SV[:, ::2] += 1e-3 * torch.arange(len(logits_SV))[:, None]
    return logits_SV


def _by_number(logits_SV: Tensor) -> Tensor:
    """One last bit differs, only with many rows, like another tile of a library's product."""
    return logits_SV if len(logits_SV) < 8 else logits_SV * torch.tensor(1 + 2**-23)


def _beyond_all(logits_SV: Tensor) -> Tensor:
    return logits_SV.fill_(float("nan"))


def _last_bit(scores: dict[str, tuple[TokenScore, ...] | None]) -> dict[str, tuple[TokenScore, ...] | None]:
    return {name: tuple((nextafter(own, 0), top) for own, top in each or ()) for name, each in scores.items()}


def _other_token(drawn: dict[str, tuple[SampledToken, ...]]) -> dict[str, tuple[SampledToken, ...]]:
    """The logits are right but the tokens are wrong."""
    return (
        drawn
        if len(drawn) < 3
        else {name: (msgspec.structs.replace(each, token=5),) for name, (each,) in drawn.items()}
    )


def _break(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, break_it: Callable[[Any], Any]) -> None:
    whole = getattr(owner, name)

    @torch.inference_mode()
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
def test_rows_that_depend_on_others_are_detected(
    owner: type, name: str, break_it: Callable[[Any], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break(monkeypatch, owner, name, break_it)
    with pytest.raises(BatchVarianceError, match=message):
        _check()


@pytest.mark.parametrize(
    ("index", "way"),
    [(4, "together with others"), (5, "in another order"), (6, "in small chunks"), (7, "in a batch of 12")],
)
def test_every_execution_mode_is_compared(index: int, way: str) -> None:
    """Each of four prompts is computed alone by its own engine; one later engine has other weights."""
    message = f"device: computed {way}, the prompt of 3 tokens gives another result"
    with pytest.raises(BatchVarianceError, match=message):
        _check(other=index)


def test_engine_does_not_start_if_batch_invariance_cannot_be_guaranteed(
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
