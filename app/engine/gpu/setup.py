"""Sets up an engine on a GPU, in the order in which memory must be measured and allocated.

First it measures the largest step with an empty cache, then it allocates the cache from the remaining memory, then it
captures the parts of steps. It runs on any device, so that tests need no GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial

import torch

from app.common.startup_timer import CAPTURING_GRAPHS, WARMING_UP
from app.engine.execution.runner import MaskProvider
from app.engine.execution.step_runner import BackendRunners
from app.engine.execution.warmup_batches import dummies, largest_step
from app.engine.gpu.cuda_capture import CudaCapture
from app.engine.gpu.decoder import PagedDecoder
from app.engine.gpu.executor import DeviceExecutor
from app.engine.gpu.graphs import StepGraphs
from app.engine.gpu.kernels.interface import PARTIAL_BYTES, SPLIT, Kernels
from app.engine.gpu.kernels.sampling_table import SamplingTable
from app.engine.gpu.resident_batch import ResidentBatch
from app.engine.gpu.runner import DeviceRunner
from app.engine.gpu.step_sizes import round_up, row_buckets, splits, token_buckets
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.memory.cache_groups import block_counts
from app.engine.memory.memory_plan import CacheShape, MemoryPeaks, mib, step_peak
from app.engine.scheduling.scheduler import StepLimits
from model.nn.transformer import Decoder


def device_runner(
    decoder: PagedDecoder,
    kernels: Kernels,
    limits: StepLimits,
    *,
    blocks: int | Items[int],
    block_size: int,
    context: int,
    deterministic: bool = False,
    grammars: MaskProvider | None = None,
) -> DeviceRunner:
    """Builds the runner with caches of `blocks` blocks (see block_counts()) and the reserved ones.

    deterministic: every step has the same shapes, so that no library selects a different algorithm because of other
    rows.
    """
    config, max_running, embedding, groups = decoder.config, limits.max_running, decoder.embedding, decoder.groups
    counts = block_counts(blocks, groups)
    table = SamplingTable(max_running + 1, config.vocab_size, embedding.device)
    resident = ResidentBatch(
        count=max_running,
        context=context,
        block_size=block_size,
        padding_blocks=counts,
        table=table,
    )
    # Slots before heads: the layout that other libraries' kernels use too.
    sizes = (block_size, config.n_kv_heads, config.head_dim)
    numbers = [count + group.n_reserved_blocks for count, group in zip(counts, groups, strict=True)]
    shapes = [(len(group.layers), 2, number, *sizes) for number, group in zip(numbers, groups, strict=True)]
    caches = [torch.zeros(shape, dtype=embedding.dtype, device=embedding.device) for shape in shapes]
    tokens = round_up(limits.tokens_per_step)
    fixed = tokens if deterministic else 0
    executor = DeviceExecutor(decoder, kernels, caches, resident, max_rows=max_running, max_tokens=tokens, tokens=fixed)
    rows, captured = row_buckets(max_running), token_buckets(tokens)
    if deterministic:
        rows, captured = rows[-1:], (tokens,) if tokens in captured else ()
    graphs = StepGraphs(executor, rows=rows, tokens=captured, max_splits=splits(context))
    return DeviceRunner(graphs, grammars=grammars)


_GRAPH_BYTES = 4 << 20
"""Assumed CUDA memory per graph in addition to its tensors; not measured on a GPU yet."""


class TritonBackend:
    """A `Backend` of app/engine/backends.py around `decoder`, whose matrices are already quantized if they should be.

    Launches steps one ahead.
    """

    def __init__(
        self, decoder: Decoder, kernels: Kernels, cache_shape: CacheShape, limits: StepLimits, *, deterministic: bool
    ) -> None:
        self._decoder = PagedDecoder(decoder, kernels)
        self._limits, self._context = limits, cache_shape.context
        self._device = decoder.embedding.device
        self._capture = CudaCapture() if self._device.type == "cuda" else None
        self._runner = partial(
            device_runner,
            self._decoder,
            kernels,
            limits,
            block_size=cache_shape.block_size,
            context=cache_shape.context,
            deterministic=deterministic,
        )

    def peaks(self) -> MemoryPeaks:
        """Measures the largest steps with an empty cache. Raises ValueError if there is too little memory.

        How many splits are computed in parallel depends on the sequences, so both numbers include the limit of that
        workspace. Captured steps share a pool as large as the largest of them.
        """
        partial_bytes = PARTIAL_BYTES if self._context > SPLIT else 0
        largest = largest_step(self._limits, self._context)
        activations = step_peak(lambda: self._runner(blocks=0).run(largest), self._device, torch.cuda) + partial_bytes
        runner = self._runner(blocks=0)

        def run_captured() -> None:
            for rows, tokens in runner.graphs.largest:
                runner.run(dummies(rows, tokens))

        # Libraries allocate a workspace on the capture stream.
        once = partial(self._capture.run_on_stream, run_captured) if self._capture else run_captured
        graphs = step_peak(once, self._device, torch.cuda) + partial_bytes + runner.graphs.count * _GRAPH_BYTES
        return MemoryPeaks(activations, graphs)

    def start(self, blocks: Items[int], grammars: GrammarTracker, announce: Callable[[str], None]) -> BackendRunners:
        """See Backend.start. Compiles all kernels, and captures decode steps if the device is a GPU."""
        announce(WARMING_UP)
        runner = self._runner(blocks=blocks, grammars=grammars)
        runner.warm_up(self._limits.tokens_per_step)
        announce(CAPTURING_GRAPHS)
        if self._capture:
            started, free = time.monotonic(), torch.cuda.mem_get_info(self._device)[0]
            runner.capture(self._capture)
            used = mib(max(0, free - torch.cuda.mem_get_info(self._device)[0]))
            announce(f"{runner.graphs.count} graphs captured in {time.monotonic() - started:.1f} s, {used}")
        return BackendRunners(runner, runner)
