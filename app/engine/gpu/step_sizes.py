"""Sizes that steps are padded to, so that few CUDA graphs and kernel variants serve all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Items

from app.engine.gpu.kernels.interface import SPLIT


def splits(length: int) -> int:
    """Number of attention splits for a sequence of this length."""
    return -(-length // SPLIT)


def row_buckets(most: int) -> tuple[int, ...]:
    """Row counts that steps are padded to, up to `most`: small ones close together, then every 16."""
    return (*(n for n in (1, 2, 4, 8, *range(16, most, 16)) if n < most), most)


def token_buckets(most: int) -> tuple[int, ...]:
    """Token counts that captured steps with prompts are padded to, up to `most` and 512."""
    return (*(n for n in (16, 32, *range(64, 512, 64)) if n < most), min(most, 512))


def round_up(count: int) -> int:
    """To a multiple of 8: tokens and tiles of a step with prompts."""
    return -(-count // 8) * 8


def bucket(count: int, buckets: Items[int]) -> int:
    """The smallest bucket that holds `count`."""
    return buckets[bisect_left(buckets, count)]
