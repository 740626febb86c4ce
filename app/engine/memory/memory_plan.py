"""Plans an engine's memory: what is in use, what a step needs, and the size of the KV cache.

total
+-- share (--gpu-memory-utilization) ------------------------------+-- kept free --+
| weights | activations of the largest step | graphs | cache       |               |
+-- less if other processes and CUDA itself use more than the part kept free ------+

The numbers come from torch.cuda, or from a fake in tests.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from app.engine.memory.cache_groups import CacheGroup, cache_dtype, cache_groups
from app.engine.memory.device_errors import lacked_device_memory
from app.engine.scheduling.block_pool import blocks_in_window
from model.cache_formats import KvCache
from model.config import ModelConfig
from model.machine import free_memory

MemoryMeter = Any
"""torch.cuda, whose functions measure and free memory, or a fake."""
Device = Any
"""A torch.device."""
TILE = 64
"""Positions of a source that attention in torch takes at once."""
_SPARE_SHARE = 64
"""A 64th of the memory stays free: kernels are loaded on first use, and torch's allocator fragments memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one GPU."""

    total: int
    utilization: float
    """Share of the total memory that the service may use, 0 to 1."""
    weights: int
    activations: int
    """Measured peak of a step."""
    graphs: int = 0
    """Reserved for captured steps."""
    other: int = 0
    """Used by CUDA itself and by other processes."""
    cache: int = 0
    """Allocated for keys and values."""

    @property
    def share(self) -> int:
        """Bytes that the service may use."""
        return int(self.total * self.utilization)

    @property
    def limit(self) -> int:
        """Bytes that the service can use: other processes may hold a part of its share."""
        return max(0, min(self.share, self.total - self.other - self.total // _SPARE_SHARE))

    @property
    def needed(self) -> int:
        """Bytes that the service needs without the cache."""
        return self.weights + self.activations + self.graphs

    @property
    def cache_budget(self) -> int:
        """Bytes that are left for the cache."""
        return max(0, self.limit - self.needed)

    def __str__(self) -> str:
        unused = self.limit - self.needed - self.cache
        return f"{self._available}: {self._used}, {mib(self.cache)} of cache, {mib(unused)} unused"

    def describe_shortage(self) -> str:
        """Part of an error message for a cache that does not fit: how much memory is left, and why."""
        return f"{mib(self.cache_budget)} are left of {self._available} after {self._used}"

    @property
    def _available(self) -> str:
        setting = f"--gpu-memory-utilization {self.utilization:g} of {mib(self.total)}"
        return f"{mib(self.limit)} ({setting}; {mib(self.other)} are used by CUDA and other processes)"

    @property
    def _used(self) -> str:
        return f"{mib(self.weights)} of weights, {mib(self.activations)} of activations, {mib(self.graphs)} of graphs"


def mib(size: int) -> str:
    """Formats bytes in whole MiB, small sizes in KiB."""
    return f"{size / 2**20:,.0f} MiB" if size >= 2**20 else f"{size >> 10} KiB"


_CPU_SHARE = 0.5
_MAX_GPU_BLOCKS = 1 << 20
"""Limit for a GPU's cache, which otherwise takes all memory that is left: each block also needs host memory."""


def choose_context(shape: ModelConfig, requested: int) -> int:
    """Most tokens of a sequence; 0 requests the model's context. Raises ValueError."""
    if requested > shape.context:
        raise ValueError(
            f"--max-context {requested} is more than the model's context of {shape.context}: lower it, or leave it out"
        )
    return requested or shape.context


_CONTEXT_UNIT = 1024
_LEAST_CONTEXT = 512
"""A service does not offer less by itself."""
_CONTEXT_SHARE = 0.9
"""Of the cache: memory may be taken by others before it is allocated."""
_CONTEXT_SEQUENCES = 4
"""The default context leaves memory for the windows of so many sequences, up to half of the cache: or else one text
could take almost all of it, and short ones would run one after the other."""
_MOST_BLOCKS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Dimensions of a service's caches.

    Cache groups without a window, and the only group of a model, have the same number of blocks, `blocks` below. A
    group with a window beside others has as many, but no more than a number of sequences need: each the blocks of a
    window and one that its chunk does not fill, and all together those of a step's tokens. So it is full before the
    others only if more sequences run than that number.
    """

    shape: ModelConfig
    context: int
    block_size: int
    max_running: int
    dtype: str
    """Number format of the steps: float32 or bfloat16."""
    kv_cache: KvCache = "auto"
    """Format of keys and values."""
    tokens_per_step: int
    """Most tokens of a step."""
    steps_at_once: int = 1
    """Steps whose tokens have blocks at the same time: more than one if a step is planned while another runs."""

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups of the KV cache."""
        return cache_groups(self.shape, cache_dtype(self.dtype, self.kv_cache))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of every group."""
        return self._token_bytes * self.block_size

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the padding blocks and null blocks."""
        tokens = self.block_size
        return sum(group.n_reserved_blocks * group.token_bytes(self.shape) * tokens for group in self.groups)

    @property
    def source_bytes(self) -> int:
        """Bytes of the encoder cache for all running requests."""
        return self._token_bytes * source_tokens(self.context) * self.max_running if self.shape.n_encoder_layers else 0

    def describe_groups(self, counts: Items[int]) -> str:
        """Part of the memory plan's text that names the groups and their numbers of blocks, if there are several."""
        if len(groups := self.groups) == 1:
            return ""
        each = (f"{count:,} blocks for {group}" for count, group in zip(counts, groups, strict=True))
        return f"; {len(groups)} cache groups: {', '.join(each)}"

    @property
    def needed_blocks(self) -> int:
        """Number of blocks of one sequence of maximal length, in a group without a window."""
        return -(-self.context // self.block_size)

    def counts(self, blocks: int, sequences: int) -> tuple[int, ...]:
        """Number of blocks of each group, with windows for `sequences` sequences."""
        groups, size = self.groups, self.block_size
        for_steps = min(sequences, self.steps_at_once) * -(-self.tokens_per_step // size)
        return tuple(
            blocks
            if group.window is None or len(groups) == 1
            else min(blocks, sequences * (blocks_in_window(group.window, size) + 1) + for_steps)
            for group in groups
        )

    def fitting(self, cache_bytes: int) -> CacheShape:
        """With the longest context whose cache fits into `cache_bytes`, if this one does not and one does."""
        left = cache_bytes - self.reserved_bytes
        affordable = self._most_blocks(int(_CONTEXT_SHARE * left), lambda n: self._cost(n, left)) * self.block_size
        whole = left >= self._cost(self.needed_blocks, left)
        if whole or self.shape.n_encoder_layers or affordable < _LEAST_CONTEXT:
            return self
        shorter = min(self.context, affordable // _CONTEXT_UNIT * _CONTEXT_UNIT or affordable)
        if any(rope.is_long(shorter) != rope.is_long(self.context) for rope in self.shape.ropes):
            return self  # other bits, on a machine with less memory: only --max-context asks for them
        return replace(self, context=shorter)

    def cache_bytes(self, counts: Items[int]) -> int:
        """Bytes of a cache with so many blocks in each group, including the reserved ones and the encoder cache."""
        return self._bytes_of(counts) + self.reserved_bytes + self.source_bytes

    @property
    def sequence_bytes(self) -> int:
        """Bytes of the blocks of one sequence of maximal length."""
        return self._bytes_of(self.counts(self.needed_blocks, 1))

    @property
    def least_cache_bytes(self) -> int:
        """Bytes of the smallest cache, for one sequence of maximal length."""
        return self.sequence_bytes + self.reserved_bytes + self.source_bytes

    def blocks(self, requested: int, free_bytes: int, engines: int = 1) -> tuple[int, ...]:
        """Number of blocks of each group, within half of the free memory, which `engines` engines share.

        requested: in groups without a window; 0: as many as all running requests can fill. Raises ValueError.
        """
        needed = self.needed_blocks
        budget = max(0, int(free_bytes * _CPU_SHARE) // engines - self.source_bytes)
        affordable = self._most_blocks(budget, self._least_bytes)
        share = "half of the free memory"
        if engines > 1:
            share = f"each engine's part of {share} (--replicas {engines})"
        if affordable < needed:
            min_bytes = self.sequence_bytes + self.source_bytes
            flags = ["--max-context", *["--max-running"] * bool(self.source_bytes), *["--replicas"] * (engines > 1)]
            raise ValueError(
                f"a sequence of {self.context} tokens needs {min_bytes >> 20} MiB of cache, more than {share} holds: "
                f"give a smaller {' or '.join(flags)}, or free some"
            )
        if not requested:
            return self._counts_within(budget, most=needed * self.max_running)
        if not needed <= requested <= affordable:
            raise ValueError(
                f"--kv-blocks {requested} does not fit: the context of {self.context} tokens needs at least "
                f"{needed} blocks, and {share} holds {affordable}"
            )
        return self.counts(requested, self._most_sequences(requested, budget))

    def blocks_on_gpu(self, requested: int, plan: MemoryPlan) -> tuple[int, ...]:
        """Number of blocks of each group.

        requested: in groups without a window; 0: as many as the plan allows. Raises ValueError.
        """
        budget = max(0, plan.cache_budget - self.source_bytes - self.reserved_bytes)
        affordable, needed = self._most_blocks(budget, self._least_bytes), self.needed_blocks
        if affordable < needed:
            raise ValueError(
                f"a sequence of {self.context} tokens needs {mib(self.least_cache_bytes)} of cache, and "
                f"{plan.describe_shortage()}: give a smaller --max-context or --max-running, a larger "
                "--gpu-memory-utilization, or stop what else uses the GPU"
            )
        if not requested:
            return self._counts_within(budget, most=_MAX_GPU_BLOCKS)
        if requested < needed:
            raise ValueError(
                f"--kv-blocks {requested} is too few: the context of {self.context} tokens needs {needed} blocks of "
                f"{self.block_size} (or a smaller --max-context)"
            )
        if requested > affordable:
            n_bytes = self.cache_bytes(self.counts(requested, 1))
            raise ValueError(
                f"--kv-blocks {requested} does not fit: these blocks need {mib(n_bytes)} of cache, "
                f"and {plan.describe_shortage()}: give at most {affordable}"
            )
        return self.counts(requested, self._most_sequences(requested, budget))

    def _counts_within(self, budget: int, *, most: int) -> tuple[int, ...]:
        """Divides `budget` bytes: one sequence of maximal length first, then windows of others, then more blocks.

        Windows come before blocks for more than one such sequence, because requests are mostly shorter: they then find
        as many blocks in each group. At most `most` blocks.
        """
        sequences = self._most_sequences(self.needed_blocks, budget)
        affordable = self._most_blocks(budget, lambda n: self._bytes_of(self.counts(n, sequences)))
        return self.counts(min(most, affordable), sequences)

    def _least_bytes(self, blocks: int) -> int:
        """Bytes of the pools with `blocks` blocks and the windows of one sequence."""
        return self._bytes_of(self.counts(blocks, 1))

    def _cost(self, blocks: int, left: int) -> int:
        """Bytes that a default context of `blocks` blocks takes of the `left` bytes of a cache."""
        several = self._bytes_of(self.counts(blocks, min(_CONTEXT_SEQUENCES, self.max_running)))
        without_windows = self._bytes_of([blocks * (group.window is None) for group in self.groups])
        return max(self._least_bytes(blocks), min(several, without_windows + left // 2))

    def _most_blocks(self, budget: int, cost: Callable[[int], int]) -> int:
        """Most blocks that cost at most `budget` bytes; cost: their bytes, which grow with them."""
        if len(self.groups) == 1:
            return budget // self.block_bytes
        return bisect_right(range(_MOST_BLOCKS), budget, key=cost) - 1

    def _most_sequences(self, blocks: int, budget: int) -> int:
        """Most sequences, up to max_running and at least 1, whose windows fit into `budget` bytes beside `blocks`."""
        numbers = range(1, self.max_running + 1)
        return max(1, bisect_right(numbers, budget, key=lambda n: self._bytes_of(self.counts(blocks, n))))

    def _bytes_of(self, counts: Items[int]) -> int:
        """Bytes of so many blocks in each group."""
        sizes = zip(counts, self.groups, strict=True)
        return self.block_size * sum(count * group.token_bytes(self.shape) for count, group in sizes)

    @property
    def _token_bytes(self) -> int:
        return sum(group.token_bytes(self.shape) for group in self.groups)


def source_tokens(context: int) -> int:
    """Capacity of a slot of the encoder cache in tokens."""
    return -(-context // TILE) * TILE


def cache_share_on_cpu(free: int, weights: int, engines: int = 1) -> int:
    """Bytes that each of `engines` engines will have for the cache, of so many free bytes before weights are loaded."""
    return max(0, int((free - weights) * _CPU_SHARE)) // engines


_GPU_CONTEXT_SHARE = 0.75
"""Of a GPU's memory without weights: an estimate of what activations and graphs leave, which are measured later."""


def cache_share_on_gpu(total: int, utilization: float, weights: int) -> int:
    """Bytes of a GPU's memory that a context may count on for its cache."""
    return max(0, int((total * utilization - weights) * _GPU_CONTEXT_SHARE))


class MemoryPeaks(NamedTuple):
    """Bytes that steps take in addition to weights and cache."""

    activations: int = 0
    graphs: int = 0
    """Memory that captured steps keep."""


class BlockBudget(NamedTuple):
    """Size of the cache."""

    counts: tuple[int, ...]
    """Number of blocks of each group."""
    plan: str
    """The memory plan, for the log."""


def blocks_on_cpu(
    cache_shape: CacheShape, weights: int, *, are_loaded: bool, requested: int, engines: int, reserved: int = 0
) -> BlockBudget:
    """Sizes the cache within half of the free memory, which `engines` engines share. Raises ValueError.

    weights: their bytes. reserved: free bytes that running engines may need for their caches.
    """
    free = max(0, free_memory() - reserved)
    counts = cache_shape.blocks(requested, free if are_loaded else free - weights, engines)
    state, cache = "loaded" if are_loaded else "read next", mib(cache_shape.cache_bytes(counts))
    beside = f" beside {mib(reserved)} that running engines have reserved" if reserved else ""
    plan = f"{mib(free)} are free{beside}; {mib(weights)} of weights, {state}; {cache} of cache"
    return BlockBudget(counts, f"{plan}{cache_shape.describe_groups(counts)}")


def blocks_on_gpu(
    cache_shape: CacheShape,
    device: Device,
    *,
    requested: int,
    utilization: float,
    peaks: MemoryPeaks,
    meter: MemoryMeter,
) -> BlockBudget:
    """Sizes the cache: the rest of the service's share, or as many blocks as requested. Raises ValueError.

    To be called while the weights are the only tensors, after the measurement has freed its own.
    """
    gc.collect()
    meter.empty_cache()
    free, total = meter.mem_get_info(device)
    weights = meter.memory_allocated(device)
    plan = MemoryPlan(
        total=total,
        utilization=utilization,
        weights=weights,
        activations=peaks.activations,
        graphs=peaks.graphs,
        other=max(0, total - free - weights),
    )
    counts = cache_shape.blocks_on_gpu(requested, plan)
    plan = replace(plan, cache=cache_shape.cache_bytes(counts))
    return BlockBudget(counts, f"{plan}{cache_shape.describe_groups(counts)}")


def step_peak(compute_once: Callable[[], object], device: Device, meter: MemoryMeter) -> int:
    """Bytes of a GPU that the largest step (execution/warmup_batches.py) needs in addition to the memory in use.

    They include memory that it keeps permanently (workspaces of libraries), and the gaps between tensors, which are
    unavailable to others all the same. Raises ValueError if there are not enough.
    """
    meter.empty_cache()
    allocated, reserved = meter.memory_allocated(device), meter.memory_reserved(device)
    meter.reset_peak_memory_stats(device)
    try:
        compute_once()
        meter.synchronize(device)
    except Exception as error:
        if not lacked_device_memory(error):
            raise
        free = meter.mem_get_info(device)[0]
    else:
        peak: int = max(meter.max_memory_allocated(device) - allocated, meter.max_memory_reserved(device) - reserved)
        meter.empty_cache()
        return peak
    raise ValueError(
        f"the largest step takes more memory than the {mib(free)} left by the weights: give a smaller "
        "--tokens-per-step, --max-running or --max-context"
    )


def release_memory(device: Device, meter: MemoryMeter) -> None:
    """Frees the memory of a GPU which a failed step held, so that the next step can use it.

    Raises CUDA's error if the device is lost: no further step can succeed, whatever the last one raised.
    """
    if device.type == "cuda":
        gc.collect()  # reference cycles may keep an error's frames alive, and these the step's tensors
        meter.synchronize(device)
        meter.empty_cache()
