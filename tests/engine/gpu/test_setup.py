"""GPU problems detected on a CPU: compiler pauses, memory missing from the plan, captured steps."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from app.common.types import SamplingParams
from app.engine.execution.warmup_batches import PermissiveGrammars, costliest_step
from app.engine.gpu.cuda_capture import CudaCapture
from app.engine.gpu.executor import SCORED_ROWS
from app.engine.gpu.graphs import StepGraphs
from app.engine.gpu.kernels.interface import PARTIAL_BYTES
from app.engine.gpu.setup import _GRAPH_BYTES, TritonBackend
from app.engine.gpu.step_inputs import StepInputs
from app.engine.gpu.transfers import Upload
from app.engine.gpu.triton_loader import check_triton, sources_key, triton_kernels
from app.engine.memory.memory_plan import CacheShape, MemoryPeaks
from app.engine.sampling.parameters import SamplingInput
from app.engine.sampling.sampler import sample
from app.engine.scheduling.scheduler import StepLimits
from app.engine.torch_backends import TorchBackend
from benchmarks.gpu.reference_kernels import ReferenceKernels
from model.config import ModelConfig
from tests.support import ROOT
from tests.support.gpu.emulated_engine import tiny_device_runner
from tests.support.gpu.kernel_backends import needs_triton
from tests.support.model.tiny_models import mixture_config, tiny_config, tiny_decoder


def test_sections_of_an_upload_are_aligned_to_16_bytes() -> None:
    """Triton compiles a kernel for each set of its pointers that are aligned: one set, and not 16 while serving."""
    upload, lengths = Upload(), (3, 0, 17, 4, 1, 1, 8)
    sections = [upload.add(range(length)) for length in lengths]
    numbers_X = upload.send(torch.device("cpu"))
    for section, length in zip(sections, lengths, strict=True):
        assert numbers_X[section].tolist() == list(range(length))
        assert section.start * numbers_X.element_size() % 16 == 0


def _backend(context: int = 64, **limits: int) -> TritonBackend:
    config, limits = tiny_config(context=context), {"tokens_per_step": 32, "max_running": 2, **limits}
    shape = CacheShape(shape=config, context=context, block_size=16, max_running=4, dtype="float32", tokens_per_step=96)
    return TritonBackend(tiny_decoder(config), ReferenceKernels(), shape, StepLimits(**limits), deterministic=False)


class _Observed(TorchDispatchMode):
    """Calls `look` with each operation, its input tensors, and the tensors it creates."""

    def __init__(self, look: Callable[[Any, list[Tensor], list[Tensor]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._look(func, *([x for x in tree_leaves(each) if isinstance(x, Tensor)] for each in ((args, kwargs), out)))
        return out


Made = set[tuple[str, torch.Size]]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """Operations with the shapes of the tensors they create while a peak is measured, for each peak."""
    measured: list[Made] = []

    def peak(compute_once: Callable[[], object], *_: object) -> int:
        made: Made = set()
        with _Observed(lambda func, _, new: made.update((func.overloadpacket.__name__, x.shape) for x in new)):
            compute_once()
        measured.append(made)
        return 7

    for user in ("gpu.setup", "torch_backends"):
        monkeypatch.setattr(f"app.engine.{user}.step_peak", peak)
    return measured


def test_resident_rows_are_measured_once_with_the_largest_step(measured: list[Made]) -> None:
    """They come on top of weights and cache: token counts of a large vocabulary are not small."""
    assert _backend().peaks().activations == 7
    counts = torch.Size((3, tiny_config().vocab_size))
    assert [("zeros", counts) in made for made in measured] == [True, False]


@pytest.mark.usefixtures("measured")
def test_parallel_splits_are_counted_where_possible() -> None:
    """Computed, not measured: neither the longest sequences nor the most rows have the most splits."""
    one, two = (_backend(context).peaks() for context in (512, 513))
    assert two.activations - one.activations == PARTIAL_BYTES
    assert two.graphs - one.graphs == PARTIAL_BYTES + 4 * _GRAPH_BYTES, "forward passes are captured twice"


def test_peak_includes_the_costliest_sampling_of_the_host(measured: list[Made]) -> None:
    """Masks, sorts of whole rows, and scores take gigabytes with 256 rows and 128,000 tokens."""
    config, limits = tiny_config(context=64), StepLimits(tokens_per_step=64, max_running=40)
    shape = CacheShape(shape=config, context=64, block_size=16, max_running=4, dtype="float32", tokens_per_step=64)
    TorchBackend(tiny_decoder(config), shape, limits).peaks()
    drawn, made = (40, config.vocab_size), measured[0]
    assert {("where", drawn), ("sort", drawn)} <= made
    assert ("log_softmax", drawn) in made, "log-probabilities of the rows that ask for them"
    assert any(name == "log_softmax" and shape[0] != 40 for name, shape in made), "scores of a prompt"


def test_peak_includes_prompt_scores_and_the_largest_captured_steps(measured: list[Made]) -> None:
    _backend(tokens_per_step=600, max_running=40).peaks()
    shapes = [{shape for _, shape in made} for made in measured]
    vocab_size, width = tiny_config().vocab_size, tiny_config().width
    assert {(SCORED_ROWS, vocab_size), (40, vocab_size), (600, width)} <= shapes[0]
    assert (40, width) in shapes[1] and (512, width) in shapes[1]


@needs_triton
def test_peak_includes_what_experts_compute_for_every_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own scratch: hidden numbers and outputs of each expert of a token, at once."""
    config = mixture_config(chosen=3)
    with_experts, none = (_kernel_peaks(each, monkeypatch) for each in (config, tiny_config(mlp_width=0)))
    assert config.experts
    scratch = 4 * 40 * config.experts.chosen * (config.width + config.experts.width)
    assert with_experts.activations - none.activations >= scratch
    assert with_experts.graphs - none.graphs >= scratch


def _kernel_peaks(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> MemoryPeaks:
    """The peaks of Triton's kernels in steps of 40 tokens."""
    monkeypatch.setattr("app.engine.gpu.setup.step_peak", lambda compute_once, *_: _peak_bytes(compute_once))
    found = triton_kernels()
    assert found
    limits = StepLimits(tokens_per_step=40, max_running=2)
    shape = CacheShape(shape=config, context=64, block_size=16, max_running=2, dtype="float32", tokens_per_step=40)
    return TritonBackend(tiny_decoder(config), found.kernels, shape, limits, deterministic=False).peaks()


def _peak_bytes(compute_once: Callable[[], object]) -> int:
    """The peak number of bytes in tensors that exist at the same time."""
    sizes: dict[int, int] = {}
    peaks = [0]

    def count(_func: Any, _given: list[Tensor], new: list[Tensor]) -> None:
        for storage in (x.untyped_storage() for x in new):
            if (name := storage._cdata) not in sizes:
                sizes[name] = storage.nbytes()
                weakref.finalize(storage, sizes.pop, name, None)
        peaks.append(sum(sizes.values()))

    with torch.inference_mode(), _Observed(count):
        compute_once()
    return max(peaks)


SAMPLING: list[dict[str, Any]] = [
    {},
    {"logprobs": 20},
    {"top_k": 1000, "typical_p": 0.5},
    {"top_p": 0.99},
    {"typical_p": 0.99, "min_p": 0.1},
    {"presence_penalty": 1.0, "repetition_penalty": 1.3, "logit_bias": ((1, 1.0),), "min_tokens": 9},
]


@pytest.mark.parametrize("rows", [2, 40])
def test_no_sampling_field_takes_more_memory_than_the_costliest_draw(rows: int) -> None:
    vocab = 2048
    logits_SV = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    plan = costliest_step(StepLimits(tokens_per_step=rows, max_running=rows), 64)
    (allowed,) = PermissiveGrammars(vocab).allowed([plan.chunks[0].sequence])

    def peak_bytes(asking: list[SamplingInput]) -> int:
        return _peak_bytes(lambda: sample(logits_SV, asking))

    requests = [chunk.sequence.request for chunk in plan.chunks]
    most = peak_bytes(
        [SamplingInput(r.params, [0] * 64, len(r.prompt), r.stop_ids, allowed if r.grammar else None) for r in requests]
    )
    plain = SamplingInput(SamplingParams(temperature=0), [0], 1)
    for sampling, temperature in itertools.product(SAMPLING, (1.0, 10.0)):
        row = SamplingInput(SamplingParams(temperature=temperature, **sampling), [0] * 64, 32, (2,), allowed)
        assert peak_bytes([row] * rows) <= most and peak_bytes([row] * (rows - 1) + [plain]) <= most, sampling


@needs_triton
def test_triton_without_a_compiler_is_refused_at_startup_with_the_reason() -> None:
    def lacks() -> None:
        raise subprocess.CalledProcessError(1, ["gcc", "cuda_utils.c"])

    with pytest.raises(ValueError, match=r"Triton cannot start on this machine .*gcc.*--kernels torch"):
        check_triton(lacks)
    check_triton(lambda: None)


@pytest.mark.parametrize("config", [tiny_config(), mixture_config(shared_width=33)], ids=["dense", "experts"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_steps_use_no_host_tensors(deterministic: bool, config: ModelConfig) -> None:
    """The host would wait for their transfer, which a captured step does not allow. meta counts as a device."""
    decoder = tiny_decoder(config).to("meta")
    executor = tiny_device_runner(decoder, max_running=4, deterministic=deterministic).graphs.executor
    tokens_T, tiles_X = (torch.zeros(n, dtype=torch.int32, device="meta") for n in (128, 4))

    def is_on_device(func: Any, given: list[Tensor], new: list[Tensor]) -> None:
        assert all(tensor.is_meta for tensor in (*given, *new)), func

    with torch.inference_mode(), _Observed(is_on_device):
        executor.decode(3, 1)
        executor.prefill(StepInputs._make([*[tokens_T] * 3, *[tiles_X] * 4]), splits=1)
        executor.draw(3)
        executor.score(torch.zeros_like(tokens_T), tokens_T)
        executor.prepare(0, tiles_X, tiles_X, tiles_X)
        words, masks, upload = (
            executor.resident.table.words_RW.shape[1],
            executor.resident.table.masks_RM.shape[1],
            Upload(),
        )
        sections = [upload.add(range(size)) for size in (1, words, *[5] * 3, 1, masks, *[2] * 4)]
        executor.resident.apply(torch.zeros(sections[-1].stop, dtype=torch.int32, device="meta"), sections)


def test_editing_the_kernels_changes_their_name_in_receipts(tmp_path: Path) -> None:
    """Once, tiles of 32 instead of 64 positions changed bits, but not the name."""
    copy = tmp_path / "engine"
    shutil.copytree(ROOT / "app/engine", copy)
    before = sources_key()
    assert sources_key(copy) == before and len(before) == 8
    kernels = ("attention", "activations", "experts")
    computes = ("gpu/kernels/interface.py", *(f"gpu/kernels/triton/{name}.py" for name in kernels), "gpu/linears.py")
    for name in (*computes, "quantization/quantized_weights.py"):
        old = sources_key(copy)
        with (copy / name).open("a") as file:
            file.write("TILE = 32\n")
        assert sources_key(copy) != old, name
    old = sources_key(copy)
    (copy / "gpu/graphs.py").write_text("")
    assert sources_key(copy) == old, "files that do not compute must not count"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the calls of torch.cuda."""
    calls: list[str] = []

    @contextmanager
    def entered(what: str) -> Iterator[None]:
        calls.append(what)
        yield

    def stream(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: calls.append(f"{name} waits for {other.name}"))

    fakes: dict[str, Callable[..., Any]] = {
        "graph_pool_handle": lambda: (0, 1),
        "Stream": lambda: stream("side"),
        "current_stream": lambda: stream("main"),
        "stream": lambda on: entered(on.name),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: calls.append("replay")),
        "graph": lambda _graph, pool, stream: entered(f"capture on {stream.name} in {pool}"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return calls


def test_capture_is_preceded_by_a_warmup_on_the_same_stream(calls: list[str]) -> None:
    """That compiles kernels and creates workspaces, which a capture must not do."""
    replay = CudaCapture()(lambda: calls.append("work"))
    replay()
    warmup = ["side waits for main", "side", "work", "main waits for side"]
    assert calls == [*warmup, "capture on side in (0, 1)", "work", "replay"]


def test_steps_are_captured_once() -> None:
    runner = tiny_device_runner(tiny_decoder(), max_running=2)
    runner.capture(lambda _work: lambda: None)
    with pytest.raises(AssertionError, match="free the workspace"):
        runner.capture(lambda _work: lambda: None)


def test_replayed_graph_depends_on_step_size_and_split_attention() -> None:
    executor = tiny_device_runner(tiny_decoder(), max_running=2).graphs.executor
    graphs, launched = StepGraphs(executor, rows=(1, 2), tokens=(16, 32), max_splits=40), []

    def recorded(part: Any) -> Callable[[], None]:
        name, sizes = part.func.__name__, [x for x in part.args if isinstance(x, int)]
        return lambda: launched.append((name, *sizes))

    graphs.capture(recorded)
    for count, splits in ((1, 1), (2, 2), (1, 40)):
        graphs.decode(count, splits)
    graphs.draw(2)
    assert launched == [("decode", 1, 1), ("decode", 2, 40), ("decode", 1, 40), ("draw", 2)]
    assert graphs.count == len(graphs.replays) == 10
    assert [graphs.tokens(count) for count in (1, 17, 33)] == [16, 32, 40]
    assert graphs.tiles(3, 16) == 8 and graphs.tiles(3, 40) == 8
