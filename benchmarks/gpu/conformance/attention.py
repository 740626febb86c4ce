"""Attention against its slow reference, and batch invariance: alone, in a batch, chunked, with any number of programs.

Shape legend: H query heads, C head_dim, N tokens of a piece.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from app.engine.gpu.kernels.interface import Kernels
from benchmarks.gpu.conformance.compare import Row, close, same_bits
from benchmarks.gpu.conformance.reference import attended
from benchmarks.gpu.conformance.scene import Piece, Scene, Shape, build
from benchmarks.gpu.conformance.subject import subject

_LARGE = (
    Shape(n_heads=32, n_kv_heads=8, head_dim=128, block_size=64, lengths=(4096, 1, 513, 512, 511, 64, 65, 9000)),
    Shape(n_heads=28, n_kv_heads=4, head_dim=128, block_size=16, lengths=(1300, 40, 1025), shared_blocks=2),
    Shape(n_heads=8, n_kv_heads=8, head_dim=64, block_size=128, lengths=(700, 2000), window=600),
    Shape(n_heads=16, n_kv_heads=2, head_dim=256, block_size=64, lengths=(1100, 3), soft_cap=50.0, window=1000),
    Shape(n_heads=6, n_kv_heads=2, head_dim=80, block_size=32, lengths=(900, 17)),
    Shape(n_heads=12, n_kv_heads=12, head_dim=96, block_size=64, lengths=(600, 100), soft_cap=30.0),
    Shape(n_heads=3, n_kv_heads=1, head_dim=32, block_size=48, lengths=(1600, 5)),
)
_TAIL = 300
_SMALL = (Shape(n_heads=4, n_kv_heads=2, head_dim=40, block_size=16, lengths=(70, 9)),)


def _formats(shape: Shape) -> list[torch.dtype]:
    """float32 for small heads only: compiling it for the largest takes half a minute, and no service uses it."""
    others = [torch.float16] * (shape.n_kv_heads == 8) + [torch.float32] * (shape.head_dim <= 80)
    return [torch.bfloat16, *others]


def check_attention(device: str, tiny: bool) -> Iterator[Row]:
    """What comes out is softmax(q k^T) v."""
    seed = time.time_ns() % 1_000_000
    for shape in _SMALL if tiny else _LARGE:
        for dtype in _formats(shape):
            what = f"{shape}, {dtype}, seed {seed}"
            yield accuracy(what, subject(device), build(shape, dtype, device, seed, tail=40), tail=40)


def check_attention_rows(device: str, tiny: bool) -> Iterator[Row]:
    """The bits of a row depend on its own tokens only."""
    seed = time.time_ns() % 1_000_000
    for shape in _SMALL if tiny else _LARGE:
        for dtype in _formats(shape):
            scene = build(shape, dtype, device, seed, tail=_TAIL)
            others = (subject(device), subject(device, partial_bytes=0))
            yield from law(f"{shape}, {dtype}, seed {seed}", others, scene, _TAIL)


def accuracy(what: str, kernels: Kernels, scene: Scene, tail: int, tile_tokens: int = 16) -> Row:
    """The last `tail` tokens of every sequence, in one step."""
    pieces = ends(scene, tail)
    found = torch.cat(scene.attend(kernels, pieces, tile_tokens))
    expected = [
        attended(scene.q[i][place], scene.k[i], scene.v[i], place, scene.spec)
        for i, first, count in pieces
        for place in range(first, first + count)
    ]
    return close(what, found, torch.stack(expected))


def law(what: str, others: tuple[Kernels, ...], scene: Scene, tail: int) -> Iterator[Row]:
    """The last tokens of every sequence in tiles of 16, all in one step, against other ways to cut them.

    others: kernels that should agree to the bit; the first is the one looked at.
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
        singles = [(i, place, 1) for i, first, count in pieces for place in _places(first, count)]
        expected = [batched[i][place - pieces[i][1]] for i, place, _ in singles]
        yield same_bits(f"{what}: single tokens", torch.cat(scene.attend(other, singles, 1)), torch.stack(expected))


def ends(scene: Scene, tail: int) -> list[Piece]:
    """The last `tail` tokens of every sequence."""
    return [(i, max(len(q) - tail, 0), min(tail, len(q))) for i, q in enumerate(scene.q)]


def _places(first: int, count: int) -> list[int]:
    return sorted({first, first + count // 3, first + count - 1})


def _chunks(piece: Piece) -> list[Piece]:
    """In two, not at a tile's edge."""
    sequence, first, count = piece
    cut = min(count, 5)
    return [chunk for chunk in ((sequence, first, cut), (sequence, first + cut, count - cut)) if chunk[2]]
