"""Attention against the reference kernels, and batch invariance: alone, batched, chunked, with any number of programs.

Sequences lie in a paged KV cache. Everything that no token may read is NaN: other blocks, positions after a sequence's
last token or before the attention window, and what its block table says after its last block. Shape legend: as in
app/engine/gpu/kernels/interface.py; H query heads, C head_dim, L positions of a sequence, N tokens of a piece.
"""

from __future__ import annotations

import random as python_random
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch
from torch import Tensor

from app.engine.gpu.kernels.interface import SPLIT, AttentionBatch, Kernels
from benchmarks.gpu.conformance.harness import close, kernels_under_test, poisoned, random, same_bits
from benchmarks.gpu.reference_kernels import ReferenceKernels
from benchmarks.gpu.results import Finding

Piece = tuple[int, int, int]
"""A sequence, the position of the first token to compute, and the number of tokens."""
_TAIL = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of a scene."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    block_size: int
    lengths: tuple[int, ...]
    """Length of each sequence."""
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    shared_blocks: int = 0
    """Number of first blocks that are those of sequence 0."""

    def __str__(self) -> str:
        more = f", window {self.window}" * bool(self.window) + f", cap {self.soft_cap}" * bool(self.soft_cap)
        more += ", sinks" * self.sinks
        heads = f"{self.n_heads}/{self.n_kv_heads} heads of {self.head_dim}"
        return f"{heads}, blocks of {self.block_size}, {len(self.lengths)} to {max(self.lengths)}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionScene:
    """Sequences with their queries, keys and values, and the paged KV cache."""

    shape: Shape
    window: int | None
    q: list[Tensor]
    """[L, H, C] of each sequence."""
    k: list[Tensor]
    v: list[Tensor]
    sinks_H: Tensor | None
    cache: Tensor
    table_RB: Tensor
    rows: list[int]
    """Resident row of each sequence."""
    rng: python_random.Random = field(repr=False)

    def attend(self, kernels: Kernels, pieces: Items[Piece], tile_tokens: int, spare_splits: int = 0) -> list[Tensor]:
        """Attention of all pieces in one step, [N, H, C] each; shuffles tiles, and mixes in dead ones and padding."""
        device = self.cache.device
        parts, tiles, starts, total = [self.q[0].new_full((1, *self.q[0].shape[1:]), float("nan"))], [], [], 1
        for sequence, first, count in pieces:
            parts.append(self.q[sequence][first : first + count])
            starts.append(total)
            for step in range(0, count, tile_tokens):
                rows = (self.rows[sequence], total + step, first + step, min(tile_tokens, count - step))
                tiles += [rows, (-1, 0, 0, 1)][: self.rng.choice((1, 2))]
            total += count
        self.rng.shuffle(tiles)
        # Separate tensors are aligned as in the engine; for rows of one tensor Triton would compile attention again.
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
            shape = self.shape
            batch = kernels.divide_attention(batch, shape.n_heads, shape.n_kv_heads, shape.head_dim, self.window)
            out_THC = kernels.attention(torch.cat(parts), self.cache, batch, self.window, shape.soft_cap, self.sinks_H)
        assert out_THC[0].isnan().all(), "the kernel wrote to a token without a tile"
        return [out_THC[start : start + piece[2]] for start, piece in zip(starts, pieces, strict=True)]


def build(shape: Shape, dtype: torch.dtype, device: str, seed: int, tail: int) -> AttentionScene:
    """Random sequences, of which the last `tail` tokens may be attended to.

    Scores are spread as in a trained model, so that every key matters in some row.
    """
    rng = python_random.Random(seed)
    q, k, v = ([] for _ in range(3))
    for number, length in enumerate(shape.lengths):
        seeds = [seed * 1000 + number * 3 + i for i in range(3)]
        q.append(2 * random((length, shape.n_heads, shape.head_dim), dtype, device, seeds[0]))
        k.append(random((length, shape.n_kv_heads, shape.head_dim), dtype, device, seeds[1]))
        v.append(random((length, shape.n_kv_heads, shape.head_dim), dtype, device, seeds[2]))
        shared = min(shape.shared_blocks * shape.block_size, length, len(k[0]))
        k[-1][:shared], v[-1][:shared] = k[0][:shared], v[0][:shared]
    cache, tables = _filled(shape, k, v, tail, rng)
    rows = list(range(len(tables) + 1))
    rng.shuffle(rows)
    table_RB = torch.full((len(rows), len(tables[0])), cache.shape[1] - 1, dtype=torch.int32, device=device)
    table_RB[rows[: len(tables)]] = torch.tensor(tables, dtype=torch.int32, device=device)
    sinks_H = 3 * random((shape.n_heads,), dtype, device, seed * 1000 + 999) if shape.sinks else None
    return AttentionScene(
        shape=shape,
        window=shape.window,
        q=q,
        k=k,
        v=v,
        sinks_H=sinks_H,
        cache=cache,
        table_RB=table_RB,
        rows=rows,
        rng=rng,
    )


def _filled(
    shape: Shape, k: list[Tensor], v: list[Tensor], tail: int, rng: python_random.Random
) -> tuple[Tensor, list[list[int]]]:
    """The cache and the block table of each sequence, padded with the last block, which no sequence owns."""
    size = shape.block_size
    counts = [-(-length // size) for length in shape.lengths]
    free = list(range(sum(counts)))
    rng.shuffle(free)
    poison = len(free)
    cache = k[0].new_full((2, poison + 1, size, *k[0].shape[1:]), float("nan"))
    tables: list[list[int]] = []
    for number, count in enumerate(counts):
        own = (tables[0] if tables else [])[: min(shape.shared_blocks, counts[0])][: len(k[number]) // size]
        own = own + [free.pop() for _ in range(count - len(own))]
        unseen = max(0, len(k[number]) - tail + 1 - shape.window) if shape.window else 0
        positions = torch.arange(unseen, len(k[number]), device=cache.device)
        slots = torch.tensor(own, device=cache.device)[positions // size] * size + positions % size
        for half, x_LKC in zip(cache, (k[number], v[number]), strict=True):
            half.flatten(0, 1)[slots] = x_LKC[unseen:]
        tables.append(own + [poison] * (max(counts) + 2 - count))
    return cache, tables


LARGE = (
    Shape(n_heads=32, n_kv_heads=8, head_dim=128, block_size=64, lengths=(4096, 1, 513, 512, 511, 64, 65, 9000)),
    Shape(n_heads=28, n_kv_heads=4, head_dim=128, block_size=16, lengths=(1300, 40, 1025), shared_blocks=2),
    Shape(n_heads=8, n_kv_heads=8, head_dim=64, block_size=128, lengths=(700, 2000), window=600),
    Shape(n_heads=16, n_kv_heads=2, head_dim=256, block_size=64, lengths=(1100, 3), window=1000),
    Shape(n_heads=8, n_kv_heads=4, head_dim=256, block_size=64, lengths=(1100, 3), window=700, soft_cap=50.0),
    Shape(n_heads=64, n_kv_heads=8, head_dim=64, block_size=64, lengths=(1100, 3, 513), window=128, sinks=True),
    Shape(n_heads=64, n_kv_heads=8, head_dim=64, block_size=64, lengths=(1600, 5, 512), sinks=True),
    Shape(n_heads=6, n_kv_heads=2, head_dim=80, block_size=32, lengths=(900, 17)),
    Shape(n_heads=12, n_kv_heads=12, head_dim=96, block_size=64, lengths=(600, 100)),
    Shape(n_heads=3, n_kv_heads=1, head_dim=32, block_size=48, lengths=(1600, 5)),
)
_SMALL = (
    Shape(n_heads=4, n_kv_heads=2, head_dim=40, block_size=16, lengths=(70, 9)),
    Shape(n_heads=4, n_kv_heads=2, head_dim=40, block_size=16, lengths=(70, 9), soft_cap=2.0),
    Shape(n_heads=4, n_kv_heads=2, head_dim=40, block_size=16, lengths=(70, 9), window=30, sinks=True),
)


def formats(shape: Shape) -> list[torch.dtype]:
    """float32 only for small heads: compiling it for the largest takes half a minute, and no service uses it."""
    others = [torch.float16] * (shape.n_kv_heads == 8) + [torch.float32] * (shape.head_dim <= 80)
    return [torch.bfloat16, *others]


def check_attention(device: str, tiny: bool) -> Iterator[Finding]:
    """Checks that the output is softmax(q k^T) v, and that the bits of a row depend on its own tokens only."""
    seed = time.time_ns() % 1_000_000
    for shape in _SMALL if tiny else LARGE:
        for dtype in formats(shape):
            what, scene = f"{shape}, {dtype}, seed {seed}", build(shape, dtype, device, seed, tail=_TAIL)
            others = (kernels_under_test(device), kernels_under_test(device, partial_bytes=0))
            yield accuracy(what, others[0], scene, tail=40)
            yield from law(what, others, scene, _TAIL)


def accuracy(what: str, kernels: Kernels, scene: AttentionScene, tail: int, tile_tokens: int = 16) -> Finding:
    """Compares the last `tail` tokens of every sequence, computed in one step, with the reference kernels."""
    pieces = ends(scene, tail)
    expected = torch.cat(scene.attend(ReferenceKernels(), pieces, tile_tokens))
    return close(what, torch.cat(scene.attend(kernels, pieces, tile_tokens)), expected)


def law(what: str, others: tuple[Kernels, ...], scene: AttentionScene, tail: int) -> Iterator[Finding]:
    """Batch invariance of the last tokens of every sequence: tiles of 16 in one step against other tilings.

    others: kernels that should agree to the bit; the first is the one under test.
    """
    kernels, pieces = others[0], ends(scene, tail)
    batched = scene.attend(kernels, pieces, 16)
    together = torch.cat(batched)
    for other in others[1:]:
        yield same_bits(f"{what}: programs", torch.cat(scene.attend(other, pieces, 16)), together)
    alone = [scene.attend(kernels, [piece], 16, spare_splits=1)[0] for piece in pieces]
    yield same_bits(f"{what}: alone", torch.cat(alone), together)
    chunks = [chunk for piece in pieces for chunk in _chunks(piece)]
    yield same_bits(f"{what}: chunks", torch.cat(scene.attend(kernels, chunks, 64)), together)
    for other in others:
        singles = [(i, position, 1) for i, first, count in pieces for position in _probe_positions(first, count)]
        expected = [batched[i][position - pieces[i][1]] for i, position, _ in singles]
        yield same_bits(f"{what}: single tokens", torch.cat(scene.attend(other, singles, 1)), torch.stack(expected))


def ends(scene: AttentionScene, tail: int) -> list[Piece]:
    """The last `tail` tokens of every sequence."""
    return [(i, max(len(q) - tail, 0), min(tail, len(q))) for i, q in enumerate(scene.q)]


def _probe_positions(first: int, count: int) -> list[int]:
    return sorted({first, first + count // 3, first + count - 1})


def _chunks(piece: Piece) -> list[Piece]:
    """Splits a piece in two, not at the edge of a tile."""
    sequence, first, count = piece
    cut = min(count, 5)
    return [chunk for chunk in ((sequence, first, cut), (sequence, first + cut, count - cut)) if chunk[2]]
