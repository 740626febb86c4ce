"""Sequences in a paged KV cache, with queries over any range of tokens in any chunks.

Everything that no token may read is NaN: other blocks, what lies behind a sequence's last token or before what a window
lets its last tokens see, what its table says behind its last block. Shape legend: as in
app/engine/gpu/kernels/interface.py; L positions of a sequence, N tokens of a piece.
"""

from __future__ import annotations

import random as python_random
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch
from torch import Tensor

from app.engine.gpu.kernels.interface import SPLIT, AttentionBatch, AttentionSpec, Kernels
from benchmarks.gpu.conformance.compare import poisoned, random

Piece = tuple[int, int, int]
"""A sequence, the position of its first token to compute, and how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a scene is made of."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    block_size: int
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    window: int | None = None
    soft_cap: float | None = None
    shared_blocks: int = 0
    """So many first blocks are those of sequence 0."""

    def __str__(self) -> str:
        more = f", window {self.window}" * bool(self.window) + f", cap {self.soft_cap}" * bool(self.soft_cap)
        heads = f"{self.n_heads}/{self.n_kv_heads} heads of {self.head_dim}"
        return f"{heads}, blocks of {self.block_size}, {len(self.lengths)} to {max(self.lengths)}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Sequences with their queries, keys and values, and the cache that holds the latter two."""

    shape: Shape
    spec: AttentionSpec
    q: list[Tensor]
    """[L, H, C] of each sequence."""
    k: list[Tensor]
    v: list[Tensor]
    cache: Tensor
    table_RB: Tensor
    rows: list[int]
    """Resident row of each sequence."""
    dice: python_random.Random = field(repr=False)

    def attend(self, kernels: Kernels, pieces: Items[Piece], tile_tokens: int, spare_splits: int = 0) -> list[Tensor]:
        """[N, H, C] of each piece, all in one step; tiles in any order, dead ones and padding between them."""
        device = self.cache.device
        parts, tiles, starts, total = [self.q[0].new_full((1, *self.q[0].shape[1:]), float("nan"))], [], [], 1
        for sequence, first, count in pieces:
            parts.append(self.q[sequence][first : first + count])
            starts.append(total)
            for step in range(0, count, tile_tokens):
                rows = (self.rows[sequence], total + step, first + step, min(tile_tokens, count - step))
                tiles += [rows, (-1, 0, 0, 1)][: self.dice.choice((1, 2))]
            total += count
        self.dice.shuffle(tiles)
        # Each by itself, and so aligned as in the engine: Triton would compile attention anew for rows of one tensor.
        columns = [torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*tiles, strict=True)]
        last = max(first + count for _, first, count in pieces)
        batch = AttentionBatch(
            block_table_RB=self.table_RB,
            tile_row_X=columns[0],
            tile_start_X=columns[1],
            tile_position_X=columns[2],
            tile_length_X=columns[3],
            tile_tokens=tile_tokens,
            max_splits=-(-last // SPLIT) + spare_splits,
        )
        with poisoned():
            out_THC = kernels.attention(torch.cat(parts), self.cache, batch, self.spec)
        assert out_THC[0].isnan().all(), "a token of no tile stays as it is"
        return [out_THC[start : start + piece[2]] for start, piece in zip(starts, pieces, strict=True)]


def build(shape: Shape, dtype: torch.dtype, device: str, seed: int, tail: int) -> Scene:
    """tail: so many last tokens of each sequence may be attended to.

    Scores are as wide as a trained model's, so that every key counts in some row.
    """
    dice = python_random.Random(seed)
    q, k, v = ([] for _ in range(3))
    for number, length in enumerate(shape.lengths):
        seeds = [seed * 1000 + number * 3 + i for i in range(3)]
        q.append(2 * random((length, shape.n_heads, shape.head_dim), dtype, device, seeds[0]))
        k.append(random((length, shape.n_kv_heads, shape.head_dim), dtype, device, seeds[1]))
        v.append(random((length, shape.n_kv_heads, shape.head_dim), dtype, device, seeds[2]))
        shared = min(shape.shared_blocks * shape.block_size, length, len(k[0]))
        k[-1][:shared], v[-1][:shared] = k[0][:shared], v[0][:shared]
    cache, tables = _filled(shape, k, v, tail, dice)
    rows = list(range(len(tables) + 1))
    dice.shuffle(rows)
    table_RB = torch.full((len(rows), len(tables[0])), cache.shape[1] - 1, dtype=torch.int32, device=device)
    table_RB[rows[: len(tables)]] = torch.tensor(tables, dtype=torch.int32, device=device)
    spec = AttentionSpec(window=shape.window, soft_cap=shape.soft_cap)
    return Scene(shape=shape, spec=spec, q=q, k=k, v=v, cache=cache, table_RB=table_RB, rows=rows, dice=dice)


def _filled(
    shape: Shape, k: list[Tensor], v: list[Tensor], tail: int, dice: python_random.Random
) -> tuple[Tensor, list[list[int]]]:
    """The cache and the block table of each sequence, padded with the cache's last block, which no sequence owns."""
    size = shape.block_size
    counts = [-(-length // size) for length in shape.lengths]
    free = list(range(sum(counts)))
    dice.shuffle(free)
    poison = len(free)
    cache = k[0].new_full((2, poison + 1, size, *k[0].shape[1:]), float("nan"))
    tables: list[list[int]] = []
    for number, count in enumerate(counts):
        own = (tables[0] if tables else [])[: min(shape.shared_blocks, counts[0])][: len(k[number]) // size]
        own = own + [free.pop() for _ in range(count - len(own))]
        unseen = max(0, len(k[number]) - tail + 1 - shape.window) if shape.window else 0
        places = torch.arange(unseen, len(k[number]), device=cache.device)
        slots = torch.tensor(own, device=cache.device)[places // size] * size + places % size
        for half, x_LKC in zip(cache, (k[number], v[number]), strict=True):
            half.flatten(0, 1)[slots] = x_LKC[unseen:]
        tables.append(own + [poison] * (max(counts) + 2 - count))
    return cache, tables
