"""Assembles an engine on a GPU, in the order in which memory has to be measured and allocated.

First the largest step is measured with an empty cache, then the cache is allocated from what is left, then decode steps
are captured. It runs on any device, which is how it is tested.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from app.engine.execution.runner import MaskProvider, Sampler
from app.engine.execution.warmup_batches import PermissiveGrammars, costliest_step, dummies, largest_step
from app.engine.gpu.decoder import PagedDecoder
from app.engine.gpu.graphs import CudaCapture, DecodeGraphs
from app.engine.gpu.kernels.interface import PARTIAL_BYTES, SPLIT, Kernels
from app.engine.gpu.kernels.sampling_state import SamplingTable
from app.engine.gpu.resident_batch import ResidentBatch, decode_buckets, splits
from app.engine.gpu.runner import DeviceRunner, Shapes
from app.engine.gpu.step import StepProgram
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.memory.memory_plan import CacheShape, step_peak
from app.engine.sampling.sampler import TorchSampler
from app.engine.scheduling.scheduler import StepLimits
from model.nn.transformer import Decoder

_TILE_ROWS = 64
"""Query tokens times heads that share keys, which one program of the attention takes at once."""
_LEAST_TILE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """What a runner must have room for."""

    max_running: int
    tokens_per_step: int
    context: int
    block_size: int
    deterministic: bool = False
    """Every step has the same shapes, so that no library takes another formula for a row because of its neighbours."""


def device_runner(
    decoder: PagedDecoder,
    kernels: Kernels,
    wishes: RunnerConfig,
    *,
    blocks: int,
    sampler: Sampler | None = None,
    guides: MaskProvider | None = None,
) -> DeviceRunner:
    """Builds the runner with a cache of `blocks` blocks and one padding block."""
    config, most, like = decoder.config, wishes.max_running, decoder.embedding
    table = SamplingTable(most + 1, config.vocab_size, like.device)
    table.with_counts()  # graphs must know where they lie
    rows = ResidentBatch(
        count=most, context=wishes.context, block_size=wishes.block_size, padding_block=blocks, table=table
    )
    # Slot before head: the layout that kernels of others read, too.
    shape = (config.n_layers, 2, blocks + 1, wishes.block_size, config.n_kv_heads, config.head_dim)
    cache = torch.zeros(shape, dtype=like.dtype, device=like.device)
    tokens = wishes.tokens_per_step if wishes.deterministic else 0
    steps = StepProgram(decoder, kernels, cache, rows, most=most, tokens=tokens)
    buckets = (most,) if wishes.deterministic else decode_buckets(most)
    graphs = DecodeGraphs(steps, buckets=buckets, max_splits=splits(wishes.context))
    shapes = Shapes(
        tile_tokens=max(_LEAST_TILE, _TILE_ROWS // (config.n_heads // config.n_kv_heads)),
        tokens=tokens,
        head_rows=most if wishes.deterministic else 0,
    )
    return DeviceRunner(graphs, shapes, sampler=sampler or TorchSampler(), guides=guides)


_GRAPH_BYTES = 4 << 20
"""Assumed CUDA memory per graph besides its tensors; not measured on a GPU yet."""


class GpuParts:
    """Around `decoder`, whose matrices are rounded already where they are to be."""

    def __init__(
        self, decoder: Decoder, kernels: Kernels, room: CacheShape, limits: StepLimits, *, deterministic: bool
    ) -> None:
        self._decoder = PagedDecoder(decoder, kernels)
        self._kernels = kernels
        self._room, self._limits = room, limits
        self._device = decoder.embedding.device
        self._capture = CudaCapture() if self._device.type == "cuda" else None
        self._wishes = RunnerConfig(
            max_running=limits.max_running,
            tokens_per_step=limits.tokens_per_step,
            context=room.context,
            block_size=room.block_size,
            deterministic=deterministic,
        )

    def activations(self) -> int:
        """Bytes of the largest step, and of the rows that are there for good. Raises ValueError: there are too few.

        Largest where the device draws, and where the host does, with torch's copies of logits. The longest sequences
        take splits in turn; somewhat shorter ones may take them at once, and hold those beside.
        """
        limits, context = self._limits, self._room.context
        steps = [largest(limits, context) for largest in (largest_step, costliest_step)]

        def work() -> None:
            runner = self._runner(0, PermissiveGrammars(self._decoder.config.vocab_size))
            for step in steps:
                runner.run(step)

        return step_peak(work, self._device) + self._partial_bytes

    def graph_bytes(self) -> int:
        """Bytes that captured steps will keep: their one pool is as large as what the largest of them takes.

        Which of them holds the most splits beside one another is not asked: not the one of most rows, where they are
        too many for that.
        """
        runner = self._runner(0)
        step = dummies(self._limits.max_running, 1)

        def work() -> None:
            runner.run(step)

        once = partial(self._capture.beside, work) if self._capture else work  # libraries need room on its stream, too
        return step_peak(once, self._device) + self._partial_bytes + runner.graphs.number * _GRAPH_BYTES

    def runner(self, blocks: int, guides: GrammarTracker) -> DeviceRunner:
        """Warmed up: kernels are compiled."""
        runner = self._runner(blocks, guides)
        runner.warm_up(self._limits.tokens_per_step)
        return runner

    def capture(self, runner: DeviceRunner) -> None:
        """Its decode steps, on a GPU."""
        if self._capture:
            runner.capture(self._capture)

    @property
    def _partial_bytes(self) -> int:
        """Most workspace of attention besides its output."""
        return PARTIAL_BYTES if self._room.context > SPLIT else 0

    def _runner(self, blocks: int, guides: MaskProvider | None = None) -> DeviceRunner:
        return device_runner(self._decoder, self._kernels, self._wishes, blocks=blocks, guides=guides)
