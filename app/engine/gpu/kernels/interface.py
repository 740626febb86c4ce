"""Interface of a step's operations on the device, their shapes, and their launch configurations.

Shape legend: T tokens of the step (padded), D width, H query heads, K kv heads, C head_dim, F mlp width, P positions of
the rotary table, R rows of resident state, B blocks of a row's table, X query tiles (or any flat axis), S sampled rows,
V vocabulary.

Every operation is safe inside a captured graph: it reads nothing on the host, and the shapes of what it makes follow
from the shapes of what it is given. The bits of a row depend on its own numbers only: not on T, not on the other rows,
and in attention not on how a sequence was cut into steps.

A launch configuration holds every number that may be tuned on a real device. Batch invariance relies on this: attention
takes the same rows, positions, warps and stages for prefill and for decode (matrix units of other shapes add in another
order), and no multiplication is fused with an addition, since where that happens is up to the compiler of each variant.
Attention's stages were measured on an H100 (PERFORMANCE.md); the other numbers are reasoned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from app.engine.gpu.kernels.sampling_state import SampleOut, SamplingTable
from model.config import Activation, Norm

SPLIT = 512
"""Positions of a sequence that attention reduces for themselves before they are merged, in order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormSpec:
    """A norm over the width; statistics and scaling in float32, rounded once. kind none: the numbers as they are."""

    kind: Norm
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadsSpec:
    """What happens to q and k between the matrix product and attention, in this order; each result is rounded."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    turned_dim: int
    """Numbers of each head that rotary positions turn; without a rotary table it means nothing."""
    q_norm: Tensor | None = None
    """[C] weights of an RMSNorm over each query head."""
    k_norm: Tensor | None = None
    eps: float = 1e-5
    q_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """How scores are hidden and bent; they are always divided by the root of head_dim first."""

    window: int | None = None
    """A token sees itself and this many - 1 before it."""
    soft_cap: float | None = None
    """Scores become cap * tanh(scores / cap)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionBatch:
    """Which query tokens stand where, in tiles of neighbours of one sequence. All tensors int32, on the device."""

    block_table_RB: Tensor
    """Blocks of each resident row, in order; entries behind its last position are not read."""
    tile_row_X: Tensor
    """Resident row of each tile; -1 is a dead tile, which does nothing."""
    tile_start_X: Tensor
    """Index in T of the tile's first token."""
    tile_position_X: Tensor
    """Position of that token in its sequence."""
    tile_length_X: Tensor
    """Tokens in the tile, 1 to tile_tokens."""
    tile_tokens: int
    """Tokens of a whole tile: 1 in steps of decodes only, 16 to 64 else."""
    max_splits: int
    """At least as many pieces of SPLIT positions as the longest sequence has."""


class RowState(NamedTuple):
    """State of resident rows between two steps, int32 on the device; the last row is padding, and stays 0."""

    block_table_RB: Tensor
    kv_length_R: Tensor
    """Tokens whose keys and values are in the cache: the position of the last token."""
    last_token_R: Tensor
    block_size: int


class Places(NamedTuple):
    """Where the rows of a decode step stand; [S] int32 each."""

    tokens_S: Tensor
    """The last of each row."""
    positions_S: Tensor
    """Where that stands in its sequence."""
    slots_S: Tensor
    """Where its keys and values go, block * block_size + offset."""
    tile_rows_S: Tensor
    """The row again, -1 for padding."""


class Kernels(Protocol):
    """A step's operations on one device. Numbers come and go in one format; sums are taken in float32 or wider."""

    def look_up(self, rows_S: Tensor, state: RowState, /) -> Places:
        """The beginning of a decode step: all that it needs to know of its rows."""
        ...

    def advance(self, rows_S: Tensor, lengths_S: Tensor, tokens_S: Tensor, state: RowState, /) -> None:
        """Its end: rows have this length and this last token now. Where none could be drawn (-1), 0 stands for it."""
        ...

    def add_norm(self, x_TD: Tensor, delta_TD: Tensor | None, norm: NormSpec, /) -> tuple[Tensor, Tensor]:
        """x + delta, rounded, and the norm of what was rounded; without delta x itself, and its norm."""
        ...

    def split_heads(
        self,
        qkv_TX: Tensor,
        spec: HeadsSpec,
        positions_T: Tensor,
        rope_PC: Tensor | None,
        layer_cache: Tensor,
        slots_T: Tensor,
        /,
    ) -> Tensor:
        """q [T, H, C], normed, turned and scaled; k and v go into the cache.

        qkv_TX [T, (H + 2 K) C]. rope_PC [P, turned_dim] float32, cosines then sines; None turns nothing. layer_cache
        [2, blocks, block, K, C]; slots_T: block * block_size + offset of each token, -1 writes nothing. Integers int32.
        """
        ...

    def attention(self, q_THC: Tensor, layer_cache: Tensor, batch: AttentionBatch, spec: AttentionSpec, /) -> Tensor:
        """softmax(q k^T / sqrt(C)) v of each token over its own sequence up to itself, written over q_THC.

        Which is what it returns; tokens that belong to no tile stay as they are.
        """
        ...

    def gate(self, hidden_TX: Tensor, activation: Activation, gated: bool, /) -> Tensor:
        """[T, F]: activation(first half), rounded, times the second half; ungated the activation of all."""
        ...

    def sample(
        self, logits_SV: Tensor, rows_S: Tensor, positions_S: Tensor, table: SamplingTable, out: SampleOut, /
    ) -> None:
        """One token for each row of logits into `out` (SampleOut), as `table` (SamplingTable) says of its row.

        Logits of a row lie side by side; the rows may be further apart than they are long.
        """
        ...


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
