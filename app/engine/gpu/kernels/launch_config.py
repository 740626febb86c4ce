"""Launch configurations of the kernels: every number that may be tuned on a real device.

Batch invariance relies on this: attention takes the same rows, positions, warps and stages for prefill and for decode
(matrix units of other shapes add in another order), and no multiplication is fused with an addition, since where that
happens is up to the compiler of each variant. Attention's stages were measured on an H100 (PERFORMANCE.md); the other
numbers are reasoned.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 64
"""Query rows (tokens times heads that share keys) of a program: the fewest that Hopper's wgmma takes."""
POSITIONS = 64
"""Positions of keys and values at a time; divides SPLIT."""
PARTIAL_BYTES = 128 << 20
"""Most workspace of attention besides its output, for splits of a sequence that are computed in parallel."""
SHARED_BYTES = 227 << 10
"""Most of a multiprocessor's memory that a program may have on Hopper; 99 to 163 KiB on the kinds before it."""
HEADS = 8
"""Heads of a token that one program prepares, or merges."""
ALIGNED = 4
"""Numbers of four bytes in 16, at multiples of which every pointer to a kernel begins: Triton compiles a kernel anew
for every other set of its pointers that do, and that would be a second's pause in the middle of serving."""
STATES = 128
"""Rows of a step that one program looks up, or advances."""
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


def attention_launch(padded_dim: int, item_size: int, shared_bytes: int = SHARED_BYTES) -> Launch:
    """With as many stages as fit into `shared_bytes`, or one. They hurry loads, and change no sum."""
    is_narrow = item_size < 4 and padded_dim <= 128
    most = 1 if item_size == 4 else 3 if is_narrow else 2
    fitting = [n for n in range(1, most + 1) if attention_bytes(padded_dim, item_size, n) <= shared_bytes]
    return Launch(num_warps=4 if is_narrow else 8, num_stages=max(fitting, default=1))


def attention_fits(head_dim: int, item_size: int, shared_bytes: int) -> bool:
    """Whether a program of attention has room on a device at all."""
    return attention_bytes(padded_dim(head_dim), item_size, 1) <= shared_bytes


def attention_bytes(padded_dim: int, item_size: int, stages: int) -> int:
    """Of a multiprocessor's memory, at most: queries, and for each stage keys and values."""
    return (ROWS + stages * 2 * POSITIONS) * padded_dim * item_size


def norm_launch(width: int) -> Launch:
    """Eight to 16 numbers of a row in a thread, up to 512 threads."""
    return Launch(num_warps=min(max(power_of_two(width) // 512, 1), 16), num_stages=1)


def power_of_two(count: int) -> int:
    """The next one from `count` on."""
    return 1 << (count - 1).bit_length()


def padded_dim(head_dim: int) -> int:
    """Columns of a head in a tile: a power of two, and no less than a matrix unit takes."""
    return max(power_of_two(head_dim), 16)
