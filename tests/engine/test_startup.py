"""Progress that an engine reports during startup, modules it does not import, and its errors if memory is missing."""

from __future__ import annotations

import logging
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from app.common import weights_store
from app.common.ipc import WorkerConfig
from app.common.startup_timer import LOADING_WEIGHTS, PHASES, PROVING, WARMING_UP
from app.common.types import Request
from app.engine import startup, torch_backends
from app.engine.backends import Placement
from app.engine.cpu.toolchain.builder import find_or_build
from app.engine.memory import memory_plan
from app.engine.scheduling.scheduler import StepLimits
from app.engine.startup import build_engine
from app.engine.torch_backends import TorchBackend
from app.engine.worker_loop import EngineStartError
from benchmarks.shapes import weights_in_memory
from model.checkpoint.config_file import load_config
from model.config import LayerKind, Rope
from model.files import sha256, write_files
from model.parameter_shapes import count_parameters, parameter_shapes
from model.positions import rope_table
from model.quantize import quantized_formats
from model.weight_formats import Quantize
from tests.engine.memory.test_device_errors import accelerator_error
from tests.support import ROOT
from tests.support.gpu.kernel_backends import needs_triton
from tests.support.model.tiny_models import (
    CPU_QUANTIZE,
    mixture_config,
    run_all,
    tiny_decoder,
    tiny_files,
    tiny_weights,
)


def _config(directory: Path, **changes: Any) -> WorkerConfig:
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kernels": "torch", "max_running": 2}
    return WorkerConfig(weights=str(tiny_weights(directory)), **{**given, "tokens_per_step": 16, **changes})


def test_phases_are_reported_in_order_with_the_memory_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    phases: list[str] = []
    with caplog.at_level(logging.INFO, "inkstream"):
        ready = build_engine(_config(tmp_path, replica=1, replicas=2), phases.append).ready
    assert [words for words in phases if words in PHASES] == [LOADING_WEIGHTS, WARMING_UP, PROVING]
    (line,) = (message for message in caplog.messages if "memory:" in message)
    assert re.fullmatch(r"engine 1: memory: [\d,]+ MiB are free; .* of weights, loaded; .* of cache", line)
    assert ready.blocks_total > 0


def _raising(*errors: BaseException) -> Callable[..., Any]:
    """Raises the last of `errors`, in whose context the one before it was raised."""

    def start(*_given: object, **_named: object) -> Any:
        error, *context = errors[::-1]
        error.__context__ = context[0] if context else None
        raise error

    return start


_LACKS = torch.OutOfMemoryError("CUDA out of memory.")
_BREAKS = accelerator_error(901, "operation failed due to a previous error during capture")


@pytest.mark.parametrize(
    ("errors", "changes", "message"),
    [
        ([_LACKS], {}, r"a cache of \d+ blocks .* give a smaller --gpu-memory-utilization or --max-running$"),
        ([_LACKS], {"kv_blocks": 32}, "give a smaller --kv-blocks or --max-running$"),
        ([_LACKS, _BREAKS], {}, "--gpu-memory-utilization or --max-running$"),
        ([_BREAKS], {}, r"--max-running; or --kernels torch, .* during capture\)$"),
        (
            [],
            {"quantize": "fp8"},
            "^--quantize fp8 requires a GPU, and the device is cpu: ",
        ),
    ],
)
def test_permanent_start_failure_names_the_setting_to_change(
    errors: list[BaseException], changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchBackend, "start", _raising(*errors))
    with pytest.raises(EngineStartError, match=message):
        build_engine(_config(tmp_path, **changes))


def test_weights_without_memory_are_a_configuration_error_and_a_lost_device_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineStartError, match="the weights do not fit"):
        build_engine(_config(tmp_path), find=_raising(_LACKS))
    lost = accelerator_error(700, "an illegal memory access was encountered")
    monkeypatch.setattr(TorchBackend, "start", _raising(lost))
    with pytest.raises(torch.AcceleratorError, match="illegal memory"):
        build_engine(_config(tmp_path))


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 4),
        ({"dtype": "bfloat16"}, 2),
        ({"kernels": "auto"}, 4),
        ({"quantize": "int8"}, 4),
        ({"quantize": "int4"}, 4),
    ],
)
def test_weights_beyond_the_free_memory_are_refused_before_they_are_read(
    changes: dict[str, Any], share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may have holes: on a disk with little space it holds more numbers than the memory."""
    config = _config(tmp_path, **changes)
    shape, needed = load_config(tmp_path), 0
    formats = quantized_formats(shape, changes["quantize"]) if "quantize" in changes else {}
    for name, (*rows, columns) in parameter_shapes(shape).items():
        packed = formats.get(name)
        needed += packed.n_bytes(math.prod(rows), columns) if packed else share * math.prod(rows) * columns
    hashed: list[Path] = []
    monkeypatch.setattr(weights_store, "sha256", lambda path: hashed.append(path) or sha256(path))
    monkeypatch.setattr(startup, "free_memory", lambda: needed - 1)
    with pytest.raises(EngineStartError, match=r"the weights take \d+ [KM]iB of memory, and \d+ [KM]iB are free"):
        build_engine(config)
    assert not hashed
    monkeypatch.setattr(startup, "free_memory", lambda: needed)
    assert build_engine(config).ready and hashed


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_context_that_does_not_fit_becomes_shorter_unless_it_was_asked_for(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(_config(tmp_path, kernels=kernels), weights=str(tiny_weights(tmp_path / "long", context=20_000)))
    tmp_path = tmp_path / "long"
    whole = build_engine(config).ready
    assert whole.context == whole.model_context == load_config(tmp_path).context
    caplog.clear()
    token = load_config(tmp_path).kv_elements_per_token * 4
    free = count_parameters(load_config(tmp_path)) * 4 + 2 * token * (whole.context // 3)
    for module in (memory_plan, startup):
        monkeypatch.setattr(module, "free_memory", lambda: free)
    shorter = build_engine(config).ready
    assert 0.2 * whole.context < shorter.context <= whole.context // 3 and shorter.model_context == whole.context
    assert f"a context of {shorter.context} tokens instead of the model's {whole.context}" in caplog.text
    with pytest.raises(EngineStartError, match="give a smaller --max-context"):
        build_engine(replace(config, max_context=whole.context))


@pytest.mark.parametrize("quantize", CPU_QUANTIZE)
def test_memory_plan_has_room_for_the_default_context(
    quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native_library: Path
) -> None:
    directory = tiny_weights(tmp_path / "long", context=20_000)
    config = replace(
        _config(tmp_path, kernels="native", library=str(native_library), quantize=quantize), weights=str(directory)
    )
    shape = load_config(directory)
    for tokens in range(1000, 8000, 1000):
        free = count_parameters(shape) * 4 + 2 * shape.kv_elements_per_token * 4 * tokens
        for module in (memory_plan, startup):
            monkeypatch.setattr(module, "free_memory", lambda free=free: free)
        assert build_engine(config).ready.context >= tokens // 2


def test_long_context_of_a_model_with_windows_takes_the_cache_of_its_other_layers(
    tmp_path: Path, native_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers and cache as Gemma 3 4B, in all other sizes tiny: 4.25 GiB for 32,768 tokens when groups were equal."""
    kinds = LayerKind(window=1024, rope=Rope()), LayerKind(rope=Rope())
    sizes = {"n_layers": 34, "n_heads": 4, "n_kv_heads": 4, "head_dim": 256, "width": 32, "mlp_width": 32}
    types = tuple(int(layer % 6 == 5) for layer in range(34))
    changes = {
        "kernels": "native",
        "library": str(native_library),
        "dtype": "bfloat16",
        "max_running": 1,
        "tokens_per_step": 256,
    }
    config = _config(tmp_path, **changes)
    weights = tiny_weights(tmp_path / "long", context=32_768, layer_kinds=kinds, layer_types=types, **sizes)
    for module in (memory_plan, startup):
        monkeypatch.setattr(module, "free_memory", lambda: 4 << 30)
    built = build_engine(replace(config, weights=str(weights)))
    engine = built.engine
    assert built.ready.context == 32_768 and built.ready.blocks_total == 2048
    caches = engine.runner.executor._caches  # type: ignore[attr-defined]
    assert built.ready.cache_bytes == sum(cache.nbytes for cache in caches) < 0.8 * 2**30
    prompt = tuple(1 + i % 300 for i in range(1500))
    (events,) = run_all(engine, [Request(id="r", prompt=prompt, max_tokens=20)]).values()
    assert len(events) == 20 and not engine.scheduler.preemptions
    assert engine.scheduler.pools[0].total == 82, "and 94 blocks of tokens went through them"


def test_tables_of_positions_are_for_the_served_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, made = _config(tmp_path, max_context=32), []
    monkeypatch.setattr(
        "model.nn.transformer.rope_table", lambda config, rope: made.append(config.context) or rope_table(config, rope)
    )
    build_engine(config)
    assert made == [32]


@pytest.mark.parametrize(
    ("changes", "reason"), [({}, "--kernels torch;"), ({"quantize": "fp8"}, "--quantize fp8 need")]
)
def test_features_that_need_torch_are_refused_without_it(
    changes: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(EngineStartError, match=rf"^torch is not installed, .*{reason}.*pip install torch"):
        build_engine(_config(tmp_path, **changes))


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_int8_cache_is_part_of_numerics_and_of_the_memory_plan(
    tmp_path: Path, kernels: str, request: pytest.FixtureRequest
) -> None:
    """Receipts, resumed streams and a second engine of the pool compare numerics."""
    if kernels == "native":
        request.getfixturevalue("native_library")
    config = _config(tmp_path, kernels=kernels, kv_blocks=32)
    plain, coded = (build_engine(replace(config, kv_cache=kv_cache)).ready for kv_cache in ("auto", "int8"))
    assert coded.numerics == f"{plain.numerics}-kv_int8"
    assert coded.cache_bytes * 4 * 16 == plain.cache_bytes * (16 + 2), "float32, heads of 16 numbers"


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_kernels_keep_the_number_format_of_the_file_and_say_so(tmp_path: Path, stored: str, quantize: Quantize) -> None:
    decoder = tiny_decoder()
    write_files(tmp_path, tiny_files(decoder, dtype=getattr(torch, stored)))
    config = WorkerConfig(weights=str(tmp_path), device="cpu", dtype="float32", quantize=quantize)
    config = replace(config, kernels="native", library=str(find_or_build()), kv_blocks=32)
    built, weights = build_engine(config), "int8-g16, int8-g32" if quantize != "none" else stored
    assert (built.ready.dtype, built.ready.weights) == ("float32", weights)
    suffix = "" if weights == "float32" else f"-{weights.replace(', ', '-')}"
    assert built.ready.numerics.endswith(f"-float32{suffix}")


def test_int8_cache_of_a_model_with_an_encoder_is_refused(tmp_path: Path) -> None:
    config = WorkerConfig(
        weights=str(tiny_weights(tmp_path, n_encoder_layers=1)), device="cpu", kernels="torch", kv_cache="int8"
    )
    with pytest.raises(EngineStartError, match=r"^--kv-cache int8 does not .* an encoder, .*: use --kv-cache auto$"):
        build_engine(config)


def test_int8_cache_on_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --device auto, only the engine knows the device."""
    monkeypatch.setattr(torch_backends, "_device", lambda _config: torch.device("cuda"))
    monkeypatch.setattr(torch_backends, "choose_dtype", lambda *_: torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    with pytest.raises(ValueError, match=r"^--kv-cache int8 requires a CPU"):
        torch_backends.place(_config(tmp_path, device="auto", kv_cache="int8"))


@pytest.mark.parametrize(
    ("kernels", "is_installed"), [pytest.param("auto", True, marks=needs_triton), ("auto", False), ("torch", True)]
)
def test_context_on_a_gpu_is_planned_with_experts_as_its_kernels_store_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, is_installed: bool
) -> None:
    """Packed by Triton, in the number format of steps by torch."""
    shape, planned = mixture_config(), list[int]()
    properties = SimpleNamespace(total_memory=1 << 30, shared_memory_per_block_optin=227 << 10)
    monkeypatch.setattr(torch_backends, "_device", lambda _config: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    share = startup.cache_share_on_gpu
    monkeypatch.setattr(startup, "cache_share_on_gpu", lambda *args: (planned.append(args[2]), share(*args))[1])
    if not is_installed:
        monkeypatch.setattr(torch_backends, "triton_kernels", lambda _bytes: None)
    config = _config(tmp_path, device="cuda", dtype="bfloat16", kernels=kernels, quantize="int8")
    placement, selected = Placement("cuda", "bfloat16", ""), SimpleNamespace(library=None)
    stored = weights_in_memory(shape)
    startup._cache_shape(config, stored, placement, selected, StepLimits(tokens_per_step=16, max_running=2))  # type: ignore[arg-type]
    are_packed = (kernels, is_installed) == ("auto", True)
    formats, expected = quantized_formats(shape, "int8"), 0
    for name, (*rows, columns) in parameter_shapes(shape).items():
        packed = formats.get(name) if name != "embedding" and (are_packed or len(rows) < 2) else None
        expected += packed.n_bytes(math.prod(rows), columns) if packed else 2 * math.prod(rows) * columns
    assert planned == [expected]


def test_torch_installed_while_the_service_runs_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"^torch is not installed"):
        build_engine(_config(tmp_path, has_torch=False))


PROGRAM = """
import pathlib, sys, torch
from tests.support.model.tiny_models import tiny_engine
from model.checkpoint.checkpoint import load
for directory in sys.argv[1:]:
    decoder = load(pathlib.Path(directory), device=torch.device("cpu"), dtype=torch.float32).decoder
    tiny_engine(decoder).runner.warm_up(8)
print([name for name in ("sympy", "torch._dynamo") if name in sys.modules])
"""


@pytest.mark.slow
def test_loading_and_the_first_steps_do_not_make_torch_import_its_compiler(tmp_path: Path) -> None:
    """Computing on the meta device would import it: 820 modules, a second of CPU, 70 MiB."""
    kinds = ("none", "sinusoidal", "learned")
    directories = [str(tiny_weights(tmp_path / kind, positions=kind)) for kind in kinds]
    command = [sys.executable, "-c", PROGRAM, *directories]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


NATIVE_ENGINE = """
import sys
import app.engine.worker_loop
from app.common.ipc import WorkerConfig
from app.common.types import Request, SamplingParams
from app.engine import startup
from app.engine.backends import Placement
from app.engine.cpu.toolchain.builder import find_or_build
from app.engine.memory import memory_plan
from app.engine.scheduling.scheduler import StepLimits
from app.engine.startup import build_engine
weights, library, quantize = sys.argv[1:]
config = WorkerConfig(weights=weights, device="cpu", kernels="native", library=library, quantize=quantize, threads=2)
engine = build_engine(config).engine
engine.add(Request(id="1", prompt=(1, 2), max_tokens=3, params=SamplingParams(logprobs=2), prompt_logprobs=1))
while engine.has_work:
    engine.step()
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print([name for name in ("torch", "pydantic", "asyncio") if name in sys.modules], int(status["VmHWM"].split()[0]) >> 10)
"""


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("quantize", CPU_QUANTIZE)
def test_native_engine_imports_no_torch_and_stays_small(tmp_path: Path, quantize: str) -> None:
    """torch costs a second of CPU and 200 MB."""
    directory, library = tiny_weights(tmp_path), find_or_build()
    command = [sys.executable, "-c", NATIVE_ENGINE, str(directory), str(library), quantize]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    imported, _, megabytes = done.stdout.rpartition(" ")
    assert (imported, done.stderr) == ("[]", "") and int(megabytes) <= 150


def test_drafts_are_looked_up_on_a_cpu_and_refused_on_a_gpu() -> None:
    cpu, gpu = Placement("cpu", "float32", "a CPU"), Placement("cuda", "bfloat16", "a GPU")
    expected = {
        ("auto", cpu): True,
        ("lookup", cpu): True,
        ("off", cpu): False,
        ("auto", gpu): False,
        ("off", gpu): False,
    }
    for (speculate, placement), speculates in expected.items():
        config = WorkerConfig(weights="weights", speculate=speculate)  # type: ignore[arg-type]
        assert startup._speculates(config, placement) is speculates, (speculate, placement)
    with pytest.raises(ValueError, match=r"--speculate lookup: a GPU .* use --speculate auto or off, or --device cpu"):
        startup._speculates(WorkerConfig(weights="weights", speculate="lookup"), gpu)


def test_start_measures_steps_and_says_what_they_cost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tiny_weights(tmp_path)
    engine = build_engine(WorkerConfig(weights=str(tmp_path), device="cpu", kernels="torch")).engine
    assert engine.scheduler.draft_planner is not None
    assert re.search(r"speculation: lookup; a step of one row takes \S+ ms, and .* of 2, .* of 32 rows", caplog.text)
    engine = build_engine(WorkerConfig(weights=str(tmp_path), device="cpu", kernels="torch", speculate="off")).engine
    assert engine.scheduler.draft_planner is None
