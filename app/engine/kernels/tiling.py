"""How kernels are cut into programs: every number that may be tuned on a real device, in one place. Knows no triton.

What the law of rows rests on: attention takes the same rows, positions, warps and stages for prefill and for decode
(matrix units of other shapes add in another order), and no multiplication is fused with an addition, since where that
happens is up to the compiler of each variant. The numbers are reasoned, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 64
"""Query rows (tokens times heads that share keys) of a program: the fewest that Hopper's wgmma takes."""
POSITIONS = 64
"""Positions of keys and values at a time; divides SPLIT."""
PARTIAL_BYTES = 128 << 20
"""Most that attention holds beside its output, for splits of a sequence that are computed beside one another."""
HEADS = 8
"""Heads of a token that one program prepares, or merges."""
COLUMNS = 1024
"""Numbers of a row that one program activates."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Warps of a program and stages of its loads."""

    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int | bool]:
        """As a launch takes them."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}


ROW_LAUNCH = Launch(num_warps=4, num_stages=1)
"""Kernels without a loop over loads."""


def attention_launch(padded_dim: int, item_size: int) -> Launch:
    """By what fits: the keys and values of a stage take 2 * POSITIONS * padded_dim * item_size of 227 KiB."""
    if item_size == 4:
        return Launch(num_warps=8, num_stages=1)
    return Launch(num_warps=4, num_stages=3) if padded_dim <= 128 else Launch(num_warps=8, num_stages=2)


def norm_launch(width: int) -> Launch:
    """Eight to 16 numbers of a row in a thread, up to 512 threads."""
    return Launch(num_warps=min(max(power_of_two(width) // 512, 1), 16), num_stages=1)


def power_of_two(count: int) -> int:
    """The next one from `count` on."""
    return 1 << (count - 1).bit_length()


def padded_dim(head_dim: int) -> int:
    """Columns of a head in a tile: a power of two, and no less than a matrix unit takes."""
    return max(power_of_two(head_dim), 16)
