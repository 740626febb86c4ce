"""Interface of a step's operations on the device, with their shapes and launch configurations.

Shape legend: T tokens of the step (padded), D width, H query heads, K kv heads, C head_dim, F mlp width, E experts (C
of a token, with hidden size F), P positions of the rotary table, R rows of resident state, B blocks of a row's table, X
query tiles (or any flat axis), S sampled rows, V vocabulary.

Every operation can be captured in a CUDA graph: it reads nothing on the host, and the shapes of its results depend on
the shapes of its inputs only. The bits of a row depend on its own numbers only: not on T, not on other rows, and in
attention not on how a sequence was divided into steps.

A launch configuration holds every number that can be tuned on a real device. Batch invariance relies on it: attention
uses the same rows, positions, warps and stages for prefill and decode (tensor cores of other shapes add in another
order), and no multiplication is fused with an addition, since the compiler decides that for each variant separately.
The stages of attention were measured on an H100 (PERFORMANCE.md); the other numbers are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from app.engine.gpu.kernels.sample_out import SampleOut
from app.engine.gpu.kernels.sampling_table import SamplingTable
from model.config import Activation, Experts, Norm
from model.nn.feed_forward import Routes
from model.nn.packed_tensors import PackedTensors

SPLIT = 512
"""Positions of a sequence that attention reduces separately; the splits are then merged in order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormSpec:
    """A norm over the width; statistics and scaling in float32, rounded once. kind none: the identity."""

    kind: Norm
    weight: Tensor | None = None
    """In any number format; None scales by 1."""
    bias: Tensor | None = None
    eps: float = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadsSpec:
    """Operations on q and k between the matrix product and attention, in this order; each result is rounded."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    turned_dim: int
    """Numbers of each head that rotary positions rotate; unused without a rotary table."""
    q_norm: Tensor | None = None
    """[C] weights of an RMSNorm over each query head, in any number format."""
    k_norm: Tensor | None = None
    eps: float = 1e-5
    norms_after: bool = False
    """Whether the norms follow the rotation."""
    query_scale_P: Tensor | None = None
    """[P] float32: factor of the queries at each position."""
    q_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterSpec:
    """The choice of experts. Logits, scores and weights are in float32; the tensors are in any number format."""

    experts: Experts
    weight_ED: Tensor
    bias_E: Tensor | None = None
    """Of the logits."""
    choice_bias_E: Tensor | None = None
    """Of the scores, for the choice only."""


class ExpertMatrices(NamedTuple):
    """One matrix of each expert."""

    numbers: Tensor | PackedTensors
    """[E, rows, columns], in the number format of the step or packed."""
    bias_EN: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertsSpec:
    """The feed-forward networks of experts."""

    up: ExpertMatrices
    """[E, 2 F, D] if gated, the gate's rows first; else [E, F, D]."""
    down: ExpertMatrices
    """[E, D, F]."""
    activation: Activation
    gated: bool


class AttentionWork(NamedTuple):
    """Work of attention in a step, one item for each program: a tile, or one split of it. int32, on the device."""

    count_1: Tensor
    """Number of items."""
    items_X2: Tensor
    """Tile and split; -1 for all splits of the tile, one after the other."""
    partials_X: Tensor
    """For each tile the index of its first partial result; -1 if one program computes it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionBatch:
    """Query tokens of a step, in tiles of consecutive tokens of one sequence. All tensors are int32, on the device."""

    block_table_RB: Tensor
    """Blocks of each resident row, in order; entries after its last position are not read."""
    tile_row_X: Tensor
    """Resident row of each tile; -1 for padding tiles, which do nothing."""
    tile_start_X: Tensor
    """Index in T of the tile's first token."""
    tile_position_X: Tensor
    """Position of that token in its sequence."""
    tile_length_X: Tensor
    """Tokens in the tile, 1 to tile_tokens."""
    tile_tokens: int
    """Tokens of a full tile: 1 in decode steps, else 16 to 64."""
    max_splits: int
    """At least the number of splits (of SPLIT positions) of the longest sequence."""
    work: AttentionWork | None = None
    """From Kernels.divide_attention(); None if each tile is one item."""


class RowState(NamedTuple):
    """State of resident rows between two steps, int32 on the device; the last row is padding."""

    block_table_RB: Tensor
    last_token_R: Tensor
    """The last token, where the device sampled it."""
    block_size: int


class RowLookup(NamedTuple):
    """What a step knows of each of its tokens; [T] int32 each."""

    tokens_T: Tensor
    positions_T: Tensor
    """Position in its sequence."""
    slots_T: Tensor
    """Cache slot of its key and value: block * block_size + offset."""
    tile_rows_T: Tensor
    """Resident row, or -1 for padding."""


class Kernels(Protocol):
    """A step's operations on one device. Inputs and outputs have one number format; sums use float32 or wider."""

    def look_up(self, rows_T: Tensor, lengths_T: Tensor, tokens_T: Tensor | None, state: RowState, /) -> RowLookup:
        """First operation of a step. lengths_T: position of each token + 1. tokens_T: -1 for the row's last token.

        Without tokens_T all of them are their rows' last tokens.
        """
        ...

    def divide_attention(
        self, batch: AttentionBatch, n_heads: int, n_kv_heads: int, head_dim: int, window: int | None, /
    ) -> AttentionBatch:
        """The batch with its work, so that the programs of attention do nothing but what there is to do.

        Long sequences are divided into splits that are computed in parallel, as far as the workspace goes:
        always for single tokens, and for all tiles in a step of few.
        """
        ...

    def add_norm(
        self, x_TD: Tensor, delta_TD: Tensor | None, norm: NormSpec, out_TD: Tensor | None = None, /
    ) -> tuple[Tensor, Tensor]:
        """Returns x + delta, rounded, and the norm of the rounded sum; without delta, x itself and its norm.

        out_TD: where the norm goes, if not into new memory.
        """
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
        """Returns q [T, H, C], normed, rotated and scaled; writes k and v to the cache.

        qkv_TX [T, (H + 2 K) C]. rope_PC [P, turned_dim] float32, cosines then sines; None rotates nothing. layer_cache
        [2, blocks, block, K, C]; slots_T: block * block_size + offset of each token, -1 writes nothing. Integers int32.
        """
        ...

    def attention(
        self,
        q_THC: Tensor,
        layer_cache: Tensor,
        batch: AttentionBatch,
        window: int | None,
        soft_cap: float | None = None,
        sinks_H: Tensor | None = None,
        /,
    ) -> Tensor:
        """Computes softmax(q k^T / sqrt(C)) v of each token over its own sequence up to itself.

        window: a token attends to itself and the window - 1 tokens before it. soft_cap: scores become cap * tanh(scores
        / cap). sinks_H: one more score of each head, in any number format, which is not capped and has no value.
        Overwrites q_THC and returns it; tokens that belong to no tile stay unchanged.
        """
        ...

    def gate(
        self, hidden_TX: Tensor, activation: Activation, gated: bool, parameters: Tensor | None = None, /
    ) -> Tensor:
        """[T, F]: activation(first half), rounded, times the second half; if not gated, activation(all).

        swiglu_clamped is rounded once.

        parameters: float32, of ACTIVATION_PARAMETERS in model/decoder_program.py: what activation_parameters() of
        model/nn/layers.py makes of the weights.
        """
        ...

    def route(self, x_TD: Tensor, router: RouterSpec, tile_rows_T: Tensor, /) -> Routes:
        """The experts of each token, as int32, and their weights; of equal scores the lower id is chosen.

        tile_rows_T: of RowLookup: a padding token chooses no experts, its ids are -1.
        """
        ...

    def experts(self, x_TD: Tensor, routes: Routes, experts: ExpertsSpec, /) -> Tensor:
        """[T, D]: the sum of each token's experts times their weights, in float32, in the order of their ids.

        The products of an expert are rounded, and so is what activation() makes of them (see gate). Tokens without
        experts get zeros. Weights of experts that no token has chosen are not read.
        """
        ...

    def sample(
        self,
        logits_SV: Tensor,
        rows_S: Tensor,
        positions_S: Tensor,
        table: SamplingTable,
        out: SampleOut,
        given_S: Tensor | None = None,
        /,
    ) -> None:
        """Samples one token for each row of logits into `out`, with the parameters of its row in `table`.

        positions_S: of the new tokens in their sequences. given_S: tokens to report instead of the sampled ones, for
        the log-probabilities of a prompt. The logits of a row are contiguous; the row stride may be larger than the
        row.
        """
        ...


ROWS = 64
"""Query rows (tokens times heads that share keys) of a program: the minimum of Hopper's wgmma."""
PARTIAL_BYTES = 128 << 20
"""Largest workspace of attention in addition to its output, for the splits that are computed in parallel. What does not
fit is computed split after split."""
SHARED_BYTES = 227 << 10
"""Largest shared memory of a program on Hopper; 99 to 163 KiB on earlier architectures."""
HEADS = 8
"""Heads of a token per program, in split_heads_kernel and merge_kernel."""
LOOKUP_ROWS = 128
"""Tokens of a step per program, in look_up_kernel."""
PROGRAMS = 528
"""Programs of attention that share the items of a step's work: four for each multiprocessor of a Hopper GPU, which
runs two at a time."""
FEW_PROGRAMS = 128
"""A step with fewer programs leaves multiprocessors idle: its prompts are divided into splits, too."""
COLUMNS = 1024
"""Columns of a row per program, in gate_kernel and combine_kernel."""


Launch = dict[str, int]
"""Launch options: warps of a program, pipeline stages of its loads, and constants that depend on them."""


def _launch(num_warps: int, num_stages: int = 1) -> Launch:
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}


ROW_LAUNCH = _launch(4)
"""For kernels without a loop over loads."""

ROUTER_LAUNCH = _launch(4, 3)


def expert_item_tokens(n_choices: int, n_experts: int) -> int:
    """Tokens that share a read of their expert's weights, at most: by the sizes of the step, not by its choices."""
    return 16 if n_choices <= 16 * n_experts else 64


def experts_launch(item_tokens: int, item_size: int, *, is_packed: bool = False) -> Launch:
    """Launch options and tile sizes of a product with experts: 128 bytes of each of 64 rows of a matrix at a time, or
    128 packed numbers, which groups of up to 128 columns divide.

    At most 72 KiB of shared memory. The tile sets the order of sums, so it must not depend on the number of tokens.
    """
    stages = 2 if item_size == 4 else 4 if item_tokens == 16 else 3
    return {"BLOCK_N": 64, "BLOCK_K": 128 if is_packed else 32 if item_size == 4 else 64, **_launch(4, stages)}


def attention_launch(padded_dim: int, item_size: int, shared_bytes: int = SHARED_BYTES) -> Launch:
    """Launch options and POSITIONS of a tile of keys and values, with as many stages as fit into `shared_bytes`.

    64 positions if two programs with three stages of them fit on a multiprocessor, as with heads of 128 on Hopper.
    Otherwise 32: on earlier GPUs for the shared memory, in wide heads and float32 for the registers. Positions set the
    order of sums; warps and stages do not.
    """
    is_narrow = item_size < 4 and padded_dim <= 128
    positions = 64 if is_narrow and 2 * attention_bytes(padded_dim, item_size, 64, stages=3) <= shared_bytes else 32
    max_stages = 1 if item_size == 4 else 3 if is_narrow else 2
    stages = [
        n for n in range(1, max_stages + 1) if attention_bytes(padded_dim, item_size, positions, n) <= shared_bytes
    ]
    warps = 16 if item_size == 4 else 4 if is_narrow else 8
    return {"POSITIONS": positions, **_launch(warps, max(stages, default=1))}


def attention_fits(head_dim: int, item_size: int, shared_bytes: int) -> bool:
    """Whether an attention program fits into the shared memory of a device."""
    launch = attention_launch(padded_dim(head_dim), item_size, shared_bytes)
    return attention_bytes(padded_dim(head_dim), item_size, launch["POSITIONS"], stages=1) <= shared_bytes


def attention_bytes(padded_dim: int, item_size: int, positions: int, stages: int) -> int:
    """Upper bound of an attention program's shared memory: queries, and keys and values of each stage."""
    return (ROWS + stages * 2 * positions) * padded_dim * item_size


def norm_launch(width: int) -> Launch:
    """Launch options with 8 to 16 numbers of a row per thread, up to 512 threads."""
    return _launch(min(max(power_of_two(width) // 512, 1), 16))


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def padded_dim(head_dim: int) -> int:
    """Columns of a head in a tile: a power of two, and at least 16, the minimum of tensor cores."""
    return max(power_of_two(head_dim), 16)
