"""Resident-row state before and after a decode step, compared with a reference on Python lists."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from app.engine.gpu.kernels.interface import Kernels, RowState
from benchmarks.gpu.conformance.compare import Row, same_bits
from benchmarks.gpu.conformance.subject import subject

_LARGE = ((256, 256, 64, 2048), (500, 129, 16, 300), (8, 1, 32, 5))


def check_rows(device: str, tiny: bool) -> Iterator[Row]:
    """Rows of a decode step."""
    for count, n_rows, block_size, n_blocks in ((5, 3, 16, 3),) if tiny else _LARGE:
        yield from states(subject(device), count, n_rows, block_size, n_blocks, device, time.time_ns() % 1_000_000)


def states(
    kernels: Kernels, count: int, n_rows: int, block_size: int, n_blocks: int, device: str, seed: int
) -> Iterator[Row]:
    """`n_rows` of `count` resident rows, followed by two padding rows. n_blocks: of each row."""
    dice = random.Random(seed)
    rows = [*dice.sample(range(count), n_rows), count, count]
    lengths = [*(dice.randrange(n_blocks * block_size) for _ in range(count)), 0]
    last = [*(dice.randrange(50_000) for _ in range(count)), 0]
    table = [[dice.randrange(10**6) for _ in range(n_blocks)] for _ in range(count + 1)]
    drawn = [dice.choice((-1, dice.randrange(50_000))) for _ in rows]
    state = RowState(_integers(table, device), _integers(lengths, device), _integers(last, device), block_size)
    found = kernels.look_up(_integers(rows, device), state)
    at = [lengths[row] for row in rows]
    slots = [table[row][p // block_size] * block_size + p % block_size for row, p in zip(rows, at, strict=True)]
    tiles = [-1 if row == count else row for row in rows]
    expected = ([last[row] for row in rows], at, slots, tiles)
    what = f"{n_rows} of {count} rows, blocks of {block_size}, seed {seed}"
    for name, one, other in zip(found._fields, found, expected, strict=True):
        yield same_bits(f"{what}: {name}", one, _integers(other, device))
    kernels.advance(_integers(rows, device), _integers([p + 1 for p in at], device), _integers(drawn, device), state)
    for row, position, token in zip(rows[:n_rows], at, drawn, strict=False):
        lengths[row], last[row] = position + 1, max(token, 0)
    yield same_bits(f"{what}: lengths", state.kv_length_R, _integers(lengths, device))
    yield same_bits(f"{what}: last tokens", state.last_token_R, _integers(last, device))


def _integers(numbers: object, device: str) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)
