"""The GPU memory plan in numbers, on fake devices; a refused start names the remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from app.engine.execution.torch_executor import Int8KVCache, TorchExecutor
from app.engine.execution.warmup_batches import costliest_step, largest_step
from app.engine.memory.cache_groups import CacheFormat, cache_places
from app.engine.memory.memory_plan import (
    CacheShape,
    MemoryPeaks,
    MemoryPlan,
    blocks_on_cpu,
    blocks_on_gpu,
    mib,
    release_memory,
    step_peak,
)
from app.engine.scheduling.scheduler import StepLimits
from model.config import LayerKind, Rope
from tests.support.model.tiny_models import native_executor, tiny_config, tiny_decoder

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
M = 1 << 20
PLAN = MemoryPlan(total=6400 * M, utilization=0.5, weights=1000 * M, activations=300 * M, graphs=100 * M, other=200 * M)


class FakeGpu:
    """Stands in for torch.cuda: memory that a step allocates and frees. `kept` is reserved without a tensor."""

    def __init__(self, *, allocated: int = 0, kept: int = 0) -> None:
        self.total, self.other, self.allocated, self.kept = 6400 * M, 200 * M, allocated, kept
        self.peak = 0
        self.calls: list[str] = []

    def step(self, size: int, *, gaps: int) -> None:
        self.peak, self.kept = size, self.kept + size + gaps

    def mem_get_info(self, _device: torch.device) -> tuple[int, int]:
        return self.total - self.other - self.memory_reserved(_device), self.total

    def memory_allocated(self, _device: torch.device) -> int:
        return self.allocated

    def max_memory_allocated(self, _device: torch.device) -> int:
        return self.allocated + self.peak

    def memory_reserved(self, _device: torch.device) -> int:
        return self.allocated + self.kept

    max_memory_reserved = memory_reserved

    def reset_peak_memory_stats(self, _device: torch.device) -> None:
        self.peak = 0

    def empty_cache(self) -> None:
        self.calls.append("empty cache")
        self.kept = 0

    def synchronize(self, _device: torch.device) -> None:
        self.calls.append("synchronize")


def _cache_shape(**changes: Any) -> CacheShape:
    sizes: dict[str, Any] = {"vocab_size": 8, "width": 64, "n_layers": 4, "n_heads": 2, "n_kv_heads": 2}
    shape = tiny_config(**{**sizes, "head_dim": 64, "context": 1024})
    given = {"context": 1024, "block_size": 64, "max_running": 4, "dtype": "bfloat16", "tokens_per_step": 256}
    return CacheShape(**{"shape": shape, **given, **changes})


def test_cache_gets_the_rest_of_the_share_and_other_processes_reduce_it_only_beyond_theirs() -> None:
    """Two services with a share of 0.45 each fit on one GPU."""
    assert (PLAN.share, PLAN.limit, PLAN.needed, PLAN.cache_budget) == (3200 * M, 3200 * M, 1400 * M, 1800 * M)
    second = replace(PLAN, utilization=0.45, other=2880 * M)
    assert second.limit == second.share == 2880 * M
    shared_gpu = replace(PLAN, other=4000 * M)
    assert shared_gpu.limit == 6400 * M - 4000 * M - 100 * M, "a 64th must stay free"
    assert replace(PLAN, other=6400 * M).limit == replace(PLAN, other=6400 * M).cache_budget == 0


def test_logged_memory_plan_adds_up() -> None:
    assert str(replace(PLAN, cache=1792 * M)) == (
        "3,200 MiB (--gpu-memory-utilization 0.5 of 6,400 MiB; 200 MiB are used by CUDA and other processes): "
        "1,000 MiB of weights, 300 MiB of activations, 100 MiB of graphs, 1,792 MiB of cache, 8 MiB unused"
    )
    assert PLAN.limit / M == 1000 + 300 + 100 + 1792 + 8


def test_gpu_cache_takes_all_remaining_memory_with_the_padding_block() -> None:
    cache_shape = _cache_shape()
    (blocks,) = cache_shape.blocks_on_gpu(0, PLAN)
    assert cache_shape.cache_bytes([blocks]) <= PLAN.cache_budget < cache_shape.cache_bytes([blocks + 1])
    assert blocks > cache_shape.needed_blocks * cache_shape.max_running, "more than all running requests can fill"
    assert cache_shape.blocks_on_gpu(blocks, PLAN) == (blocks,) and cache_shape.blocks_on_gpu(16, PLAN) == (16,)
    assert _cache_shape(block_size=1).blocks_on_gpu(0, replace(PLAN, total=1 << 50, utilization=1.0)) == (1 << 20,)


def _refused(cache_shape: CacheShape, plan: MemoryPlan, requested: int = 0) -> str:
    with pytest.raises(ValueError, match=r"MiB|blocks") as caught:
        cache_shape.blocks_on_gpu(requested, plan)
    return str(caught.value)


def test_too_many_configured_blocks_are_refused_with_the_maximum() -> None:
    cache_shape = _cache_shape()
    (most,) = cache_shape.blocks_on_gpu(0, PLAN)
    message = _refused(cache_shape, PLAN, most + 1)
    assert message.startswith(f"--kv-blocks {most + 1} does not fit: ") and message.endswith(f"give at most {most}")
    assert "--kv-blocks 15 is too few: the context of 1024 tokens needs 16 blocks of 64" in _refused(
        cache_shape, PLAN, 15
    )


def test_too_little_memory_is_refused_with_needed_free_and_used_amounts() -> None:
    cache_shape = _cache_shape()
    tight = replace(PLAN, weights=PLAN.share - 400 * M - cache_shape.cache_bytes([4]))
    message = _refused(cache_shape, tight)
    assert f"needs {mib(cache_shape.cache_bytes([16]))} of cache" in message
    assert f"{mib(cache_shape.cache_bytes([4]))} are left of 3,200 MiB" in message
    full = replace(PLAN, utilization=0.9, other=6000 * M)  # a reload's engine next to the old one
    message = _refused(cache_shape, full)
    assert "6,000 MiB are used by CUDA and other processes" in message
    assert "a smaller --max-context or --max-running" in message and message.endswith("stop what else uses the GPU")


def test_encoder_sources_are_reserved_first() -> None:
    cache_shape = _cache_shape()
    shape = tiny_config(
        n_encoder_layers=2, context=1024, n_kv_heads=cache_shape.shape.n_kv_heads, head_dim=64, n_layers=4
    )
    reading = replace(cache_shape, shape=shape)
    (blocks,) = reading.blocks_on_gpu(0, PLAN)
    assert blocks * reading.block_bytes < PLAN.cache_budget - reading.source_bytes < PLAN.cache_budget
    message = _refused(reading, replace(PLAN, weights=PLAN.share - 400 * M - reading.cache_bytes([4])))
    assert "a smaller --max-context or --max-running" in message


def test_gpu_memory_is_measured_when_only_the_weights_are_loaded() -> None:
    gpu = FakeGpu(allocated=1000 * M, kept=50 * M)
    peaks = MemoryPeaks(activations=300 * M, graphs=100 * M)
    blocks = blocks_on_gpu(_cache_shape(), CUDA, requested=0, utilization=0.5, peaks=peaks, meter=gpu)
    assert blocks.counts == _cache_shape().blocks_on_gpu(0, PLAN), "memory that torch had cached must be released"
    assert blocks.plan == str(replace(PLAN, cache=_cache_shape().cache_bytes(blocks.counts)))


def test_peak_of_a_step_includes_fragmentation_and_excludes_earlier_memory() -> None:
    gpu = FakeGpu(allocated=1000 * M, kept=400 * M)
    assert step_peak(lambda: gpu.step(70 * M, gaps=5 * M), CUDA, gpu) == 75 * M
    assert gpu.kept == 0 and gpu.calls[-2:] == ["synchronize", "empty cache"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory."),
            pytest.raises(ValueError, match="6,200 MiB left by the weights"),
        ),
        (ZeroDivisionError(), pytest.raises(ZeroDivisionError)),
    ],
)
def test_too_large_step_is_refused_with_options_that_reduce_it(error: Exception, raised: Any) -> None:
    def lacks() -> None:
        raise error

    with raised:
        step_peak(lacks, CUDA, FakeGpu())


def test_memory_is_released_only_after_synchronizing_and_never_on_a_cpu() -> None:
    gpu = FakeGpu()
    release_memory(CUDA, gpu)
    release_memory(CPU, gpu)
    assert gpu.calls == ["synchronize", "empty cache"]


@pytest.mark.parametrize(("tokens", "rows", "context"), [(256, 32, 1024), (8, 8, 64), (500, 2, 100), (40, 1, 1)])
def test_largest_step_uses_the_full_limits(tokens: int, rows: int, context: int) -> None:
    plan = largest_step(StepLimits(tokens_per_step=tokens, max_running=rows), context)
    lengths = [chunk.stop - chunk.start for chunk in plan.chunks]
    assert len(lengths) == rows and all(chunk.samples and chunk.stop == context for chunk in plan.chunks)
    assert sum(lengths) == min(tokens, rows * context)
    counted = [chunk.sequence.request.params.repetition_penalty != 1 for chunk in plan.chunks]
    assert counted == [True] + [False] * (rows - 1), "no real step has the tokens of all sequences"
    costly = costliest_step(StepLimits(tokens_per_step=tokens, max_running=rows), context)
    assert [(c.start, c.stop) for c in costly.chunks] == [(c.start, c.stop) for c in plan.chunks]
    assert all(chunk.sequence.request.grammar for chunk in costly.chunks)
    assert [bool(chunk.scores) for chunk in costly.chunks] == [lengths[0] > 2] + [False] * (rows - 1)


@pytest.mark.parametrize(("max_running", "number"), [(4, 64), (32, 100)])
def test_cpu_engines_share_half_of_the_free_memory(
    max_running: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_shape = _cache_shape(max_running=max_running)
    free = 2 * 100 * cache_shape.block_bytes
    monkeypatch.setattr("app.engine.memory.memory_plan.free_memory", lambda: free)
    plans = [blocks_on_cpu(cache_shape, 1000, are_loaded=True, requested=0, engines=engines) for engines in (1, 2)]
    assert [plan.counts for plan in plans] == [(number,), (50,)]
    plan = blocks_on_cpu(
        cache_shape, 1000, are_loaded=True, requested=0, engines=1, reserved=100 * cache_shape.block_bytes
    )
    assert plan.counts == (min(number, 50),), "running engines will write their caches"
    assert "that running engines have reserved" in plan.plan
    for requested, bytes_, engines, words in (
        (60, free, 2, r"--kv-blocks 60 .* and each engine's part .* \(--replicas 2\) holds 50$"),
        (160, free, 1, r"and half of the free memory holds 100$"),
        (0, free, 50, r"give a smaller --max-context or --replicas, or free some$"),
        (0, free // 50, 1, r"half of the free memory holds: give a smaller --max-context, or free some$"),
    ):
        with pytest.raises(ValueError, match=words):
            cache_shape.blocks(requested, bytes_, engines)


def _mixed(dtype: str = "bfloat16") -> CacheShape:
    """Layers 0 and 2 have a window of 600, layer 1 none, layer 3 one of 40."""
    kinds = (LayerKind(window=600), LayerKind(), LayerKind(window=40))
    alike = _cache_shape(dtype=dtype)
    return replace(alike, shape=replace(alike.shape, layer_kinds=kinds, layer_types=(0, 1, 0, 2)))


def test_layers_that_share_a_window_are_a_cache_group() -> None:
    groups = _mixed().groups
    assert [(group.layers, group.window) for group in groups] == [((0, 2), 600), ((1,), None), ((3,), 40)]
    assert cache_places(groups) == [(0, 0), (1, 0), (0, 1), (2, 0)]
    assert {group.format for group in groups} == {CacheFormat("bfloat16")}
    (alike,) = _cache_shape().groups
    assert (alike.layers, alike.window) == ((0, 1, 2, 3), None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_of_all_groups_take_the_memory_of_one_group(dtype: str) -> None:
    """And each group with a window has one block more, the null block."""
    mixed, alike = _mixed(dtype), _cache_shape(dtype=dtype)
    assert mixed.block_bytes == alike.block_bytes == alike.cache_bytes([0])
    difference = mixed.cache_bytes([7] * 3) - alike.cache_bytes([7])
    assert difference == alike.block_bytes * 3 // 4, "of three layers in two groups"


def _windowed(**changes: Any) -> CacheShape:
    """29 layers with a window of 1,024 and 5 without, 4 kv heads of 256: 4,096 bytes a token and layer in bfloat16."""
    kinds, types = (LayerKind(window=1024), LayerKind()), tuple(int(layer % 6 == 5) for layer in range(34))
    sizes = {"n_layers": 34, "n_heads": 4, "n_kv_heads": 4, "head_dim": 256, "width": 64, "vocab_size": 8}
    shape = tiny_config(**sizes, context=32_768, layer_kinds=kinds, layer_types=types)
    given = {"context": 32_768, "block_size": 16, "max_running": 32, "dtype": "bfloat16", "tokens_per_step": 256}
    return CacheShape(shape=shape, **{**given, **changes})


def test_a_group_with_a_window_has_blocks_for_the_windows_of_the_sequences_that_may_run() -> None:
    """A window of 1,024 lies in up to 65 blocks of 16; one more is for a chunk, and 16 are for a step's 256 tokens."""
    assert [group.window for group in _windowed().groups] == [1024, None]
    for sequences in (1, 2, 32):
        assert _windowed().counts(65_536, sequences) == (66 * sequences + 16, 65_536)
    assert _windowed().counts(50, 32) == (50, 50), "never more than a group that keeps all"
    gpu = _windowed(block_size=64, tokens_per_step=2048, steps_at_once=3)
    assert gpu.counts(4096, 1) == (18 + 32, 4096) and gpu.counts(4096, 4) == (4 * 18 + 3 * 32, 4096)
    alone = replace(_windowed().shape, layer_kinds=(LayerKind(window=1024),), layer_types=())
    assert replace(_windowed(), shape=alone).counts(65_536, 1) == (65_536,), "the only group of a model"


def test_a_long_context_takes_the_cache_of_its_layers_without_a_window() -> None:
    """It took 4.25 GiB when each group had as many blocks."""
    before = _windowed().cache_bytes([2048, 2048])
    assert round(before / 2**30, 2) == 4.25
    assert round(_windowed().least_cache_bytes / 2**30, 2) == 0.77
    gpu = _windowed(block_size=64, tokens_per_step=2048, steps_at_once=3)
    assert round(gpu.least_cache_bytes / 2**30, 2) == 0.99
    long = _windowed(context=131_072)
    assert round(long.least_cache_bytes / 2**30, 2) == 2.65


@pytest.mark.parametrize("share", [5, 8, 20, 40, 300])
def test_memory_is_divided_among_groups_by_what_sequences_need(share: int) -> None:
    """One sequence of maximal length first, then windows of others, then more blocks for the layers without one."""
    shape, part = _windowed(), 2**30 // 5
    budget = share * part
    counts = windows, blocks = shape.blocks(0, 2 * budget)
    assert shape.sequence_bytes <= shape.cache_bytes(counts) - shape.reserved_bytes <= budget
    sequences = min(32, (windows - 16) // 66)
    assert counts == shape.counts(blocks, sequences) and sequences >= 1
    for more, is_most in (
        (shape.counts(2048, sequences + 1), sequences == 32),
        (shape.counts(blocks + 1, sequences), blocks == 2048 * 32),
    ):
        assert is_most or shape.cache_bytes(more) - shape.reserved_bytes > budget, "the rest holds no more"
    plan = replace(PLAN, total=1 << 50, utilization=1.0, other=0)
    plan = replace(plan, weights=plan.limit - 400 * M - budget - shape.reserved_bytes)
    on_gpu = shape.blocks_on_gpu(0, plan)
    assert on_gpu == counts or (blocks == 2048 * 32 and on_gpu[0] == windows and on_gpu[1] > blocks)


def test_requested_blocks_are_those_of_layers_without_a_window() -> None:
    shape, free = _windowed(), 16 << 30
    assert shape.blocks(2048, free) == (2048, 2048), "32 sequences may run, and 2,048 blocks hold 32,768 tokens"
    assert shape.blocks(6000, free) == (66 * 32 + 16, 6000)
    assert shape.blocks(2048, 2 << 30) == (148, 2048), "the windows of two sequences"
    with pytest.raises(ValueError, match=r"--kv-blocks 4000 does not fit: .* at least 2048 blocks, .* holds 2801$"):
        shape.blocks(4000, 2 << 30)
    with pytest.raises(ValueError, match=r"a sequence of 32768 tokens needs 788 MiB of cache"):
        shape.blocks(0, 1 << 30)


@pytest.mark.parametrize(("head_dim", "least"), [(64, 1.9), (128, 1.95), (256, 1.98)])
def test_int8_cache_holds_almost_twice_the_sequences_in_the_same_memory(head_dim: int, least: float) -> None:
    alike, free = _cache_shape(block_size=16, max_running=10_000), 8 << 30
    plain = replace(alike, shape=replace(alike.shape, head_dim=head_dim))
    coded = replace(plain, kv_cache="int8")
    assert coded.block_bytes == 16 * 4 * 2 * 2 * (head_dim + 2), "each key and each value has a scale of two bytes"
    sequences = [shape.blocks(0, free)[0] // shape.needed_blocks for shape in (plain, coded)]
    assert least < sequences[1] / sequences[0] < 2


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_int8_cache_allocates_the_bytes_of_the_plan(dtype: str) -> None:
    """In both executors, of a model with two groups; the kernels pad heads to whole vectors."""
    shape = tiny_config(head_dim=20, layer_kinds=(LayerKind(window=40), LayerKind()), layer_types=(0, 1))
    decoder = tiny_decoder(shape, dtype=getattr(torch, dtype))
    plan = _cache_shape(shape=shape, context=256, block_size=16, dtype=dtype, kv_cache="int8")
    executor = TorchExecutor(decoder, blocks=9, block_size=16, kv_cache="int8")
    caches = [cache for cache in executor._caches if isinstance(cache, Int8KVCache)]
    assert sum(cache.data.nbytes + cache.scales.nbytes for cache in caches) == plan.cache_bytes([9, 9])
    padded = replace(plan, shape=replace(shape, head_dim=32))
    native = native_executor(decoder, 9, kv_cache="int8")
    assert sum(cache.nbytes for cache in native._caches) == padded.cache_bytes([9, 9])


def test_memory_plan_names_cache_groups_if_there_are_several() -> None:
    assert _cache_shape().describe_groups([7]) == ""
    text = "; 3 cache groups: 52 blocks for 2 layers with a window of 600, 64 blocks for 1 layer, "
    text += "16 blocks for 1 layer with a window of 40"
    plan = blocks_on_cpu(_mixed(), 0, are_loaded=True, requested=0, engines=1)
    assert plan.counts == (52, 64, 16)
    assert plan.plan.endswith(f" of cache{text}")


def test_default_context_is_the_longest_whose_cache_fits() -> None:
    alike = _cache_shape()
    long = replace(alike, context=131_072)
    needed = long.cache_bytes([long.needed_blocks])
    assert long.fitting(needed) is long and alike.fitting(10**15) is alike
    for share in (needed - 1, needed // 2, needed // 7):
        fitting = long.fitting(share)
        assert 0.7 * share < fitting.cache_bytes([fitting.needed_blocks]) < share
        assert fitting.context % 1024 == 0 and replace(fitting, context=131_072) == long
    assert long.fitting(long.cache_bytes([10])).context == 9 * long.block_size, "less than 1,024 tokens: whole blocks"
    for share in (0, long.block_bytes, long.cache_bytes([8])):
        assert long.fitting(share) is long, "less than 512 tokens: refused later, with numbers"


def test_default_context_counts_windows_once_and_leaves_others_their_share() -> None:
    """4,096 bytes a token and layer; 82 blocks of 29 layers are the windows of one sequence, 280 those of four."""
    long = _windowed(context=131_072)
    token, window = 5 * 4096, 29 * 4096 * 16
    left = long.reserved_bytes + 3 * 2**30 // 2
    fitting = long.fitting(left)
    assert fitting.context == int(0.9 * 1.5 * 2**30 - 280 * window) // token // 1024 * 1024
    assert long.fitting(left - 2**30 // 2).context == int(0.9 * 2**30 - 2**29) // token // 1024 * 1024, "at most half"
    assert _windowed(context=131_072, max_running=1).fitting(left).context > fitting.context
    contexts = [long.fitting(part << 24).context for part in range(20, 250)]
    assert contexts == sorted(contexts) and contexts[-1] == 131_072, "more memory, no shorter context"


def test_default_context_does_not_change_the_factors_of_a_longrope() -> None:
    factors = {"short_factors": (1.0,) * 32, "long_factors": (2.0,) * 32}
    rope = Rope(kind="longrope", original_context=8192, **factors)
    alike = _cache_shape()
    long = replace(alike, context=131_072, shape=replace(alike.shape, layer_kinds=(LayerKind(rope=rope),)))
    assert long.fitting(long.cache_bytes([16_384 // long.block_size])).context == 14_336
    assert long.fitting(long.cache_bytes([8192 // long.block_size])) is long
