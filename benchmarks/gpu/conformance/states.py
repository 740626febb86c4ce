"""Resident-row state before and after a decode step, compared with a reference on Python lists."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from app.engine.gpu.kernels.interface import Kernels, RowState
from benchmarks.gpu.conformance.harness import Row, kernels_under_test, same_bits

_LARGE = ((256, 256, 64, 2048), (500, 129, 16, 300), (8, 1, 32, 5))


def check_rows(device: str, tiny: bool) -> Iterator[Row]:
    """State of the rows of a decode step."""
    for count, n_rows, block_size, n_blocks in ((5, 3, 16, 3),) if tiny else _LARGE:
        yield from states(
            kernels_under_test(device), count, n_rows, block_size, n_blocks, device, time.time_ns() % 1_000_000
        )


def states(
    kernels: Kernels, count: int, n_rows: int, block_size: int, n_blocks: int, device: str, seed: int
) -> Iterator[Row]:
    """Checks `n_rows` of `count` resident rows with `n_blocks` blocks each, followed by two padding rows."""
    rng = random.Random(seed)
    rows = [*rng.sample(range(count), n_rows), count, count]
    lengths = [*(rng.randrange(n_blocks * block_size) for _ in range(count)), 0]
    last = [*(rng.randrange(50_000) for _ in range(count)), 0]
    table = [[rng.randrange(10**6) for _ in range(n_blocks)] for _ in range(count + 1)]
    sampled = [rng.choice((-1, rng.randrange(50_000))) for _ in rows]
    state = RowState(_integers(table, device), _integers(lengths, device), _integers(last, device), block_size)
    actual = kernels.look_up(_integers(rows, device), state)
    at = [lengths[row] for row in rows]
    slots = [table[row][p // block_size] * block_size + p % block_size for row, p in zip(rows, at, strict=True)]
    tiles = [-1 if row == count else row for row in rows]
    expected = ([last[row] for row in rows], at, slots, tiles)
    what = f"{n_rows} of {count} rows, blocks of {block_size}, seed {seed}"
    for name, one, other in zip(actual._fields, actual, expected, strict=True):
        yield same_bits(f"{what}: {name}", one, _integers(other, device))
    kernels.advance(_integers(rows, device), _integers([p + 1 for p in at], device), _integers(sampled, device), state)
    for row, position, token in zip(rows[:n_rows], at, sampled, strict=False):
        lengths[row], last[row] = position + 1, max(token, 0)
    yield same_bits(f"{what}: lengths", state.kv_length_R, _integers(lengths, device))
    yield same_bits(f"{what}: last tokens", state.last_token_R, _integers(last, device))


def _integers(numbers: object, device: str) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)
