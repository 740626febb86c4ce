"""Native executor: a decoder and its KV cache in the C++ kernels, called twice a step.

The reference implementation and fallback in torch is app/engine/execution/runner.py. Both are batch-invariant, but
their results differ in the last bits.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence as Items
from weakref import finalize

import torch
from torch import Tensor

from app.common.types import BatchPlan, Chunk
from app.engine.cpu.library import Library, Step, zeros
from app.engine.cpu.program import BLOCK, Program, head_numbers
from model.nn.transformer import Decoder

_SPINS = 2000
"""How often a thread looks for work before it sleeps: some 20 us, less than a step's pauses between operations."""


class Threads:
    """The kernels' threads. Closed when the last who uses them is gone. Raises ValueError."""

    def __init__(self, library: Library, count: int) -> None:
        self.count = count
        self.handle: int = library.open_pool(count, _SPINS) or 0
        if not self.handle:
            raise ValueError(f"the system gives this process no {count} threads: ask for fewer with --threads")
        finalize(self, library.close_pool, self.handle)


class NativeCompute:
    """Packs the weights at construction; the decoder is not needed afterwards.

    The cache holds [layer, 2, block, kv_head, 16 slots x head_dim], within a block as source/attend.h says; the last
    block is padding.
    """

    def __init__(
        self, library: Library, decoder: Decoder, threads: Threads, *, blocks: int, int8: bool = False
    ) -> None:
        self.config = decoder.config
        self._library, self._threads = library, threads
        self.program = program = Program(library, decoder, int8=int8)
        shape = (self.config.n_layers, 2, blocks + 1, self.config.n_kv_heads, BLOCK * head_numbers(self.config))
        self._cache = zeros(shape, program.dtype)
        self._padding_block = blocks
        self._machine = library.open(program.shape(self._cache), threads.handle)
        finalize(self, library.close, self._machine)
        self._logits = torch.empty(0, program.logits_columns)
        self.seconds: array[float] | None = None
        """Where each operation of `program` adds its time, for profiling."""

    def run(self, plan: BatchPlan) -> Items[Chunk]:
        """One step; rows stand in the order of the plan."""
        if plan.clear:
            self._cache[:, :, list(plan.clear)] = 0
        if plan.copies:
            sources, targets = ([pair[side] for pair in plan.copies] for side in (0, 1))
            self._cache[:, :, targets] = self._cache[:, :, sources]
        tokens, chunks, tables = array("i"), array("i"), array("i")
        for chunk in plan.chunks:
            start, stop, sequence = chunk.start, chunk.stop, chunk.sequence
            chunks.extend((stop - start, start, len(tables)))
            tokens.extend(sequence.tokens[start:stop])
            n_blocks = -(-stop // BLOCK)
            table = sequence.blocks[:n_blocks] or [self._padding_block] * n_blocks
            assert len(table) == n_blocks, "the kernels would read on in the next sequence's blocks"
            tables.extend(table)
        addresses = (numbers.buffer_info()[0] for numbers in (tokens, chunks, tables))
        step = Step(len(tokens), len(plan.chunks), *addresses, self.seconds and self.seconds.buffer_info()[0])
        self._library.run(self._machine, ctypes.byref(step))
        return plan.chunks

    def logits(self, rows: Items[int]) -> Tensor:
        """float32, in memory that the next call uses again."""
        if len(rows) > len(self._logits):
            self._logits = torch.empty(len(rows), self._logits.shape[1])
        columns, places = self._logits.shape[1], array("i", rows)
        self._library.head(self._machine, places.buffer_info()[0], len(rows), self._logits.data_ptr(), columns)
        return self._logits[: len(rows), : self.config.vocab_size]
