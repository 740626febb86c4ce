"""The golden check: an engine verifies golden.json before its first request, in any number format."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from app.common.ipc import WorkerConfig
from app.common.types import Request, RequestStarted
from app.engine.checks.golden_check import check_finite_logits, check_golden
from app.engine.startup import build_engine
from app.engine.worker_loop import EngineStartError
from model.checkpoint.golden import GOLDEN_FILE, golden_file
from model.checkpoint.manifest import MANIFEST_FILE, manifest_file
from model.files import CheckpointError
from tests.support.model.bad_weights import bad_weights, good_weights
from tests.support.model.tiny_models import tiny_config, tiny_decoder, tiny_engine

PROMPT = [random.Random(3).randrange(1, 320) for _ in range(40)]
NUMBERS = ["float32", "bfloat16", "int8"]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def directory(tmp_path: Path, weights: Path) -> Path:
    """The tiny weights with a golden.json."""
    copy = Path(shutil.copytree(weights, tmp_path / "golden"))
    (copy / GOLDEN_FILE).write_bytes(golden_file(tiny_decoder(), PROMPT))
    return copy


def _config(directory: Path, number: str, kernels: str = "torch", library: Path | None = None) -> WorkerConfig:
    return WorkerConfig(
        weights=str(directory),
        device="cpu",
        dtype="float32" if number == "float32" else "bfloat16",
        quantize="int8" if number == "int8" else "none",
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
def test_every_way_to_compute_meets_the_file(
    directory: Path, number: str, kernels: str, request: pytest.FixtureRequest
) -> None:
    library = request.getfixturevalue("native_library") if kernels == "native" else None
    logged = _announced(_config(directory, number, kernels, library))[-1]
    assert logged.startswith(f"{GOLDEN_FILE} passed, {'largest' if number == 'float32' else 'mean'} difference")


@pytest.mark.parametrize("number", NUMBERS)
def test_another_model_is_found_out_in_every_number_format(directory: Path, number: str) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 5.0}))
    with pytest.raises(EngineStartError, match=r"golden\.json: the log-probabilities differ by (up to|a mean of) \d"):
        build_engine(_config(directory, number))


def test_a_set_that_is_not_whole_is_refused(directory: Path, weights: Path) -> None:
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    (directory / MANIFEST_FILE).write_bytes(manifest_file(files))
    assert _announced(_config(directory, "float32"))[-1].endswith(f", {MANIFEST_FILE} passed")
    assert _announced(_config(weights, "float32"))[-1] == f"no {GOLDEN_FILE}"
    (directory / "generation_config.json").write_text("{}")
    with pytest.raises(EngineStartError, match=r"generation_config\.json: differs from manifest\.json"):
        build_engine(_config(directory, "float32"))


@pytest.mark.parametrize(
    ("n_encoder_layers", "context", "result"),
    [(0, 256, "passed"), (1, 256, "passed"), (0, 20, "passed"), (0, 1, "max-context"), (1, 20, "max-context")],
)
def test_a_check_leaves_the_engine_idle_and_its_cache_to_itself(
    tmp_path: Path, n_encoder_layers: int, context: int, result: str
) -> None:
    """A short context takes as much of the prompt as fits, but an encoder needs all of it."""
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


def test_logits_that_are_not_finite_are_no_proof(tmp_path: Path) -> None:
    (tmp_path / GOLDEN_FILE).write_bytes(golden_file(tiny_decoder(), PROMPT))
    spoilt = tiny_decoder()
    spoilt.embedding[PROMPT[3]] = float("nan")
    with pytest.raises(CheckpointError, match=r"golden\.json: .*(not finite)"):
        check_golden(tiny_engine(spoilt), tmp_path, tiny_config(), context=256, number_format="float32")


@pytest.fixture
def exploding(tmp_path: Path) -> Path:
    """Finite numbers without a golden.json; what the model makes of them is not finite."""
    return bad_weights(tmp_path / "bad", good_weights(tmp_path / "good", 0), "numbers that explode")


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("number", NUMBERS)
def test_weights_that_explode_are_refused_in_every_number_format(
    exploding: Path, number: str, kernels: str, request: pytest.FixtureRequest
) -> None:
    library = request.getfixturevalue("native_library") if kernels == "native" else None
    with pytest.raises(EngineStartError, match=rf"model\.safetensors: .* are not finite in {number}") as refusal:
        build_engine(_config(exploding, number, kernels, library))
    assert ("serve them with --dtype float32" in str(refusal.value)) == (number != "float32")
