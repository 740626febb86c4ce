"""Sets up an engine on a GPU, in the order in which memory must be measured and allocated.

First it measures the largest step with an empty cache, then it allocates the cache from the remaining memory, then it
captures the decode steps. It runs on any device, so that tests need no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from app.common.startup_timer import CAPTURING_GRAPHS, WARMING_UP
from app.engine.execution.runner import BackendRunners, MaskProvider
from app.engine.execution.warmup_batches import PermissiveGrammars, costliest_step, dummies, largest_step
from app.engine.gpu.decoder import PagedDecoder
from app.engine.gpu.graphs import CudaCapture, DecodeGraphs
from app.engine.gpu.kernels.interface import PARTIAL_BYTES, SPLIT, Kernels
from app.engine.gpu.kernels.sampling_state import SamplingTable
from app.engine.gpu.resident_batch import ResidentBatch, decode_buckets, splits
from app.engine.gpu.runner import DeviceRunner
from app.engine.gpu.step import StepProgram
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.memory.memory_plan import CacheShape, MemoryPeaks, step_peak
from app.engine.sampling.sampler import TorchSampler
from app.engine.scheduling.scheduler import StepLimits
from model.nn.transformer import Decoder


def device_runner(
    decoder: PagedDecoder,
    kernels: Kernels,
    limits: StepLimits,
    *,
    blocks: int,
    block_size: int,
    context: int,
    deterministic: bool = False,
    grammars: MaskProvider | None = None,
) -> DeviceRunner:
    """Builds the runner with a cache of `blocks` blocks and one padding block.

    deterministic: every step has the same shapes, so that no library selects a different algorithm because of other
    rows.
    """
    config, max_running, embedding = decoder.config, limits.max_running, decoder.embedding
    table = SamplingTable(max_running + 1, config.vocab_size, embedding.device)
    resident = ResidentBatch(
        count=max_running, context=context, block_size=block_size, padding_block=blocks, table=table
    )
    # Slots before heads: the layout that other libraries' kernels use too.
    shape = (config.n_layers, 2, blocks + 1, block_size, config.n_kv_heads, config.head_dim)
    cache = torch.zeros(shape, dtype=embedding.dtype, device=embedding.device)
    tokens = limits.tokens_per_step if deterministic else 0
    steps = StepProgram(decoder, kernels, cache, resident, max_rows=max_running, tokens=tokens)
    buckets = (max_running,) if deterministic else decode_buckets(max_running)
    graphs = DecodeGraphs(steps, buckets=buckets, max_splits=splits(context))
    return DeviceRunner(graphs, sampler=TorchSampler(), grammars=grammars)


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

        These are the largest step that samples on the device, and the largest one that samples on the host, with
        torch's copies of the logits. The longest sequences process their splits sequentially, somewhat shorter ones in
        parallel, and with the most rows there may be too many for that. So both numbers include the limit of that
        workspace. Captured steps share a pool as large as the largest of them.
        """
        steps = [largest(self._limits, self._context) for largest in (largest_step, costliest_step)]

        def compute_largest() -> None:
            runner = self._runner(blocks=0, grammars=PermissiveGrammars(self._decoder.config.vocab_size))
            for step in steps:
                runner.run(step)

        partial_bytes = PARTIAL_BYTES if self._context > SPLIT else 0
        activations = step_peak(compute_largest, self._device) + partial_bytes
        runner = self._runner(blocks=0)
        decode = partial(runner.run, dummies(self._limits.max_running, 1))
        # Libraries allocate a workspace on the capture stream.
        once = partial(self._capture.run_on_stream, decode) if self._capture else decode
        graphs = step_peak(once, self._device) + partial_bytes + runner.graphs.count * _GRAPH_BYTES
        return MemoryPeaks(activations, graphs)

    def start(self, blocks: int, grammars: GrammarTracker, announce: Callable[[str], None]) -> BackendRunners:
        """See Backend.start. Compiles all kernels, and captures decode steps if the device is a GPU."""
        announce(WARMING_UP)
        runner = self._runner(blocks=blocks, grammars=grammars)
        runner.warm_up(self._limits.tokens_per_step)
        announce(CAPTURING_GRAPHS)
        if self._capture:
            runner.capture(self._capture)
        return BackendRunners(runner, runner)
