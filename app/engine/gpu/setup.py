"""Sets up an engine on a GPU, in the order in which memory must be measured and allocated.

First it measures the largest step with an empty cache, then it allocates the cache from the remaining memory, then it
captures the decode steps. It runs on any device, so that tests need no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from app.common.startup_timer import CAPTURING_GRAPHS, WARMING_UP
from app.engine.execution.runner import BackendRunners, MaskProvider, Sampler
from app.engine.execution.warmup_batches import PermissiveGrammars, costliest_step, dummies, largest_step
from app.engine.gpu.decoder import PagedDecoder
from app.engine.gpu.graphs import CudaCapture, DecodeGraphs
from app.engine.gpu.kernels.interface import PARTIAL_BYTES, SPLIT, Kernels
from app.engine.gpu.kernels.sampling_state import SamplingTable
from app.engine.gpu.resident_batch import ResidentBatch, decode_buckets, splits
from app.engine.gpu.runner import DeviceRunner, Shapes
from app.engine.gpu.step import StepProgram
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.memory.memory_plan import CacheShape, MemoryPeaks, step_peak
from app.engine.sampling.sampler import TorchSampler
from app.engine.scheduling.scheduler import StepLimits
from model.nn.transformer import Decoder

_TILE_ROWS = 64
"""Query rows (tokens times heads that share keys) of one attention program."""
_MIN_TILE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Limits that a runner is built for."""

    max_running: int
    tokens_per_step: int
    context: int
    block_size: int
    deterministic: bool = False
    """Every step has the same shapes, so that no library selects a different algorithm because of other rows."""


def device_runner(
    decoder: PagedDecoder,
    kernels: Kernels,
    runner_config: RunnerConfig,
    *,
    blocks: int,
    sampler: Sampler | None = None,
    grammars: MaskProvider | None = None,
) -> DeviceRunner:
    """Builds the runner with a cache of `blocks` blocks and one padding block."""
    config, max_running, embedding = decoder.config, runner_config.max_running, decoder.embedding
    table = SamplingTable(max_running + 1, config.vocab_size, embedding.device)
    resident = ResidentBatch(
        count=max_running,
        context=runner_config.context,
        block_size=runner_config.block_size,
        padding_block=blocks,
        table=table,
    )
    # Slots before heads: the layout that other libraries' kernels use too.
    shape = (config.n_layers, 2, blocks + 1, runner_config.block_size, config.n_kv_heads, config.head_dim)
    cache = torch.zeros(shape, dtype=embedding.dtype, device=embedding.device)
    tokens = runner_config.tokens_per_step if runner_config.deterministic else 0
    steps = StepProgram(decoder, kernels, cache, resident, max_rows=max_running, tokens=tokens)
    buckets = (max_running,) if runner_config.deterministic else decode_buckets(max_running)
    graphs = DecodeGraphs(steps, buckets=buckets, max_splits=splits(runner_config.context))
    shapes = Shapes(
        tile_tokens=max(_MIN_TILE_TOKENS, _TILE_ROWS // (config.n_heads // config.n_kv_heads)),
        tokens=tokens,
        head_rows=max_running if runner_config.deterministic else 0,
    )
    return DeviceRunner(graphs, shapes, sampler=sampler or TorchSampler(), grammars=grammars)


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
        self._kernels = kernels
        self._cache_shape, self._limits = cache_shape, limits
        self._device = decoder.embedding.device
        self._capture = CudaCapture() if self._device.type == "cuda" else None
        self._config = RunnerConfig(
            max_running=limits.max_running,
            tokens_per_step=limits.tokens_per_step,
            context=cache_shape.context,
            block_size=cache_shape.block_size,
            deterministic=deterministic,
        )

    def activations(self) -> int:
        """Bytes of the largest step, including resident rows. Raises ValueError if there is too little memory.

        Measures the largest step that samples on the device, and the largest one that samples on the host, with
        torch's copies of the logits. The longest sequences process their splits sequentially; somewhat shorter ones may
        process them in parallel, which takes extra workspace.
        """
        limits, context = self._limits, self._cache_shape.context
        steps = [largest(limits, context) for largest in (largest_step, costliest_step)]

        def work() -> None:
            runner = self._runner(0, PermissiveGrammars(self._decoder.config.vocab_size))
            for step in steps:
                runner.run(step)

        return step_peak(work, self._device) + self._partial_bytes

    def graph_bytes(self) -> int:
        """Bytes that captured steps will keep: their shared pool is as large as the largest of them.

        Which step has the most parallel splits is not computed: with the most rows there may be too many to run in
        parallel. So the estimate adds the limit of that workspace.
        """
        runner = self._runner(0)
        step = dummies(self._limits.max_running, 1)

        def work() -> None:
            runner.run(step)

        # Libraries allocate a workspace on the capture stream.
        once = partial(self._capture.run_on_stream, work) if self._capture else work
        return step_peak(once, self._device) + self._partial_bytes + runner.graphs.count * _GRAPH_BYTES

    def peaks(self) -> MemoryPeaks:
        """Measures the largest steps with an empty cache. Raises ValueError."""
        return MemoryPeaks(self.activations(), self.graph_bytes())

    def start(self, blocks: int, grammars: GrammarTracker, announce: Callable[[str], None]) -> BackendRunners:
        """See Backend.start. Compiles all kernels, and captures decode steps if the device is a GPU."""
        announce(WARMING_UP)
        runner = self._runner(blocks, grammars)
        runner.warm_up(self._limits.tokens_per_step)
        announce(CAPTURING_GRAPHS)
        if self._capture:
            runner.capture(self._capture)
        return BackendRunners(runner, runner)

    @property
    def _partial_bytes(self) -> int:
        """Largest workspace of attention in addition to its output."""
        return PARTIAL_BYTES if self._cache_shape.context > SPLIT else 0

    def _runner(self, blocks: int, grammars: MaskProvider | None = None) -> DeviceRunner:
        return device_runner(self._decoder, self._kernels, self._config, blocks=blocks, grammars=grammars)
