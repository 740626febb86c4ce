"""Native executor: a decoder and its KV cache in C++ kernels, called twice a step.

The reference implementation and fallback in torch is app/engine/execution/torch_executor.py. Both are batch-invariant,
but their results differ in the last bits.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence as Items
from ctypes import CDLL
from weakref import finalize

import numpy as np

from app.engine.cpu.huge_pages import HugepageAllocator, zeros
from app.engine.cpu.library import Shape, Step, address_of
from app.engine.cpu.packed_decoder import (
    BLOCK,
    PackedDecoder,
    StoredFormat,
    as_computed,
    padded_head_dim,
)
from app.engine.memory.cache_groups import block_counts
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, non_finite_chunks
from model.cache_formats import KvCache
from model.config import ModelConfig
from model.number_formats import Array
from model.quantize import PackedWeights

_SPINS = 2000
"""Polls for work before a thread sleeps: about 20 us, less than the pauses between the operations of a step."""


class ThreadPool:
    """Threads of the native kernels; closed when the object is garbage collected. Raises ValueError."""

    def __init__(self, library: CDLL, count: int) -> None:
        self.count = count
        self.handle: int = library.ink_open_pool(count, _SPINS) or 0
        if not self.handle:
            raise ValueError(f"the system cannot start {count} threads for this process: set a smaller --threads")
        finalize(self, library.ink_close_pool, self.handle)


class NativeSession:
    """Registers and scratch memory of a decoder for the threads of one pool; closed when garbage collected."""

    def __init__(self, library: CDLL, shape: Shape, pool: ThreadPool) -> None:
        self.pool = pool
        self.handle: int = library.ink_open(shape, pool.handle)
        finalize(self, library.ink_close, self.handle)


class NativeExecutor:
    """Executor that reads and packs the weights at construction.

    The cache of each group holds [layer of the group, 2, block, kv_head, 16 slots x head_dim], or bytes in place of
    numbers if it has codes, within a block as source/cache_formats.h says; the reserved blocks come last.
    """

    def __init__(
        self,
        library: CDLL,
        config: ModelConfig,
        weights: PackedWeights,
        pool: ThreadPool,
        *,
        dtype: str,
        blocks: int | Items[int],
        stored_format: StoredFormat = as_computed,
        kv_cache: KvCache = "auto",
        restored: HugepageAllocator | None = None,
    ) -> None:
        """blocks: see block_counts(). weights, stored_format, restored: see PackedDecoder."""
        self.config = config
        self._library = library
        self.decoder = decoder = PackedDecoder(
            library,
            config,
            weights,
            pool.handle,
            dtype=dtype,
            stored_format=stored_format,
            kv_cache=kv_cache,
            restored=restored,
        )
        numbers = decoder.cache_dtype
        block = BLOCK * decoder.groups[0].format.head_bytes(padded_head_dim(config)) // numbers.itemsize
        sizes = (config.n_kv_heads, block)
        counts, groups = block_counts(blocks, decoder.groups), decoder.groups
        shapes = [
            (len(group.layers), 2, count + group.n_reserved_blocks, *sizes)
            for count, group in zip(counts, groups, strict=True)
        ]
        self._caches = [zeros(shape, numbers) for shape in shapes]
        table_length = -(-self.config.context // BLOCK)
        self._padding_tables = tuple(array("i", [count]) * table_length for count in counts)
        self.session = self.session_on(pool)
        """Replace it to compute with other threads: the same bits."""
        self._logits = np.empty((0, decoder.logits_columns), np.float32)
        self._view, self._view_address = self._logits[:, : config.vocab_size], 0  # what logits() returned last
        self.not_finite: Items[Chunk] = ()
        self._finite, self._finite_address = bytearray(), 0
        self.seconds: array[float] | None = None
        """Profile: one entry for each operation of `decoder`, which adds its duration; None turns profiling off."""

    def session_on(self, pool: ThreadPool) -> NativeSession:
        """A session of this decoder and its cache on the threads of `pool`."""
        return NativeSession(self._library, self.decoder.shape(self._caches), pool)

    def run(self, plan: BatchPlan) -> Items[Chunk]:
        """Runs one step; rows are in the order of the plan."""
        for group, block in plan.clear:
            self._caches[group][:, :, block] = 0
        for group, source, target in plan.copies:
            self._caches[group][:, :, target] = self._caches[group][:, :, source]
        tokens, chunks, has_groups = array("q"), list[int](), len(self._caches) > 1
        append_token = tokens.append
        for chunk in plan.chunks:
            start, stop, sequence = chunk.start, chunk.stop, chunk.sequence
            tables = sequence.blocks or self._padding_tables
            blocks = tables[0]
            assert len(blocks) * BLOCK >= stop, "the kernels would read the blocks of the next sequence"
            n_rows = stop - start
            if n_rows == 1:
                append_token(sequence.tokens[start])  # faster than a slice
            else:
                tokens += chunk.tokens
            chunks += (n_rows, start, blocks.buffer_info()[0])
            if has_groups:
                assert len(tables) == len(self._caches), "the kernels would read past the chunk"
                for others in tables[1:]:
                    assert len(others) * BLOCK >= stop, "the kernels would read past the table"
                    chunks.append(others.buffer_info()[0])
        table = array("q", chunks)
        addresses = (tokens.buffer_info()[0], table.buffer_info()[0])
        seconds = self.seconds and self.seconds.buffer_info()[0]
        if len(tokens) > len(self._finite):
            self._finite = bytearray(len(tokens))
            self._finite_address = ctypes.addressof(ctypes.c_char.from_buffer(self._finite))
        step = Step(len(tokens), len(plan.chunks), *addresses, seconds, self._finite_address)
        self._library.ink_run(self.session.handle, ctypes.byref(step))
        is_finite = self._finite.find(0, 0, len(tokens)) < 0
        self.not_finite = () if is_finite else non_finite_chunks(self._finite, plan.chunks)
        return plan.chunks

    def logits(self, rows: Items[int]) -> Array:
        """float32 logits [rows, V], in memory that the next call reuses; the same array for the same number of rows."""
        count, columns = len(rows), self._logits.shape[1]
        if count > len(self._logits):
            self._logits = np.empty((count, columns), np.float32)
        if count != len(self._view):
            self._view = self._logits[:count, : self.config.vocab_size]
            self._view_address = address_of(self._view)
        row_indices = array("i", rows)
        self._library.ink_head(self.session.handle, row_indices.buffer_info()[0], count, self._view_address, columns)
        return self._view
