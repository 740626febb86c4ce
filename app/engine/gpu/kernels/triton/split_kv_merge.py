"""Splits of a sequence that were attended to one by one, put together in order, by Triton. Knows no keys and no values.

Shape legend: T tokens, H query heads, C head_dim (padded), Y splits, X query tiles, R heads of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from app.engine.gpu.kernels.interface import SPLIT, AttentionBatch, AttentionSpec
from app.engine.gpu.kernels.launch_config import HEADS, ROW_LAUNCH, padded_dim


@triton.jit
def merged(best_R, sum_R, out_RC, more_best_R, more_sum_R, more_out_RC):
    """(maximum, sum, values) of both together; a side that saw nothing (maximum -inf) leaves the other as it is."""
    better_R = tl.maximum(best_R, more_best_R)
    zero_R = tl.where(better_R == float("-inf"), 0.0, better_R)
    kept_R, added_R = tl.exp2(best_R - zero_R), tl.exp2(more_best_R - zero_R)
    sum_R = sum_R * kept_R + more_sum_R * added_R
    return better_R, sum_R, out_RC * kept_R[:, None] + more_out_RC * added_R[:, None]


@triton.jit
def averaged(out_RC, sum_R):
    """Values by the sum of their weights; a row that saw nothing is nobody's, and no reason to divide by 0."""
    return out_RC / tl.where(sum_R == 0.0, 1.0, sum_R)[:, None]


@triton.jit(do_not_specialize=["n_tokens"])
def merge_kernel(
    values_ptr,
    statistics_ptr,
    row_ptr,
    start_ptr,
    position_ptr,
    length_ptr,
    out_ptr,
    n_tokens,
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Some heads of one token, over the splits that it sees something of."""
    tile, step = tl.program_id(0) // TILE_TOKENS, tl.program_id(0) % TILE_TOKENS
    if (tl.load(row_ptr + tile) < 0) | (step >= tl.load(length_ptr + tile)):
        return
    token, position = tl.load(start_ptr + tile) + step, tl.load(position_ptr + tile) + step
    head_R, column_C = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, PADDED)
    there_R = head_R < N_HEADS
    there_RC = there_R[:, None] & (column_C < HEAD_DIM)[None, :]
    best_R, sum_R = tl.full((HEADS,), float("-inf"), tl.float32), tl.zeros((HEADS,), tl.float32)
    out_RC = tl.zeros((HEADS, PADDED), tl.float32)
    first = tl.maximum(position - WINDOW + 1, 0) // SPLIT if WINDOW else 0
    for split in range(first, position // SPLIT + 1):
        place_R = (split * n_tokens.to(tl.int64) + token) * N_HEADS + head_R
        more_best_R = tl.load(statistics_ptr + 2 * place_R, mask=there_R, other=0.0)
        more_sum_R = tl.load(statistics_ptr + 2 * place_R + 1, mask=there_R, other=1.0)
        more_out_RC = tl.load(values_ptr + place_R[:, None] * HEAD_DIM + column_C[None, :], mask=there_RC, other=0.0)
        best_R, sum_R, out_RC = merged(best_R, sum_R, out_RC, more_best_R, more_sum_R, more_out_RC)
    out_RC = averaged(out_RC, sum_R).to(out_ptr.dtype.element_ty)
    place_R = (token.to(tl.int64) * N_HEADS + head_R) * HEAD_DIM
    tl.store(out_ptr + place_R[:, None] + column_C[None, :], out_RC, mask=there_RC)


def merge_partials(
    values_YTHC: Tensor, statistics_YTH2: Tensor, out_THC: Tensor, batch: AttentionBatch, spec: AttentionSpec
) -> None:
    """Into out_THC, for every token of a tile. Statistics: maximum (to the base 2) and sum of each split."""
    n_tokens, n_heads, head_dim = out_THC.shape
    merge_kernel[(len(batch.tile_row_X) * batch.tile_tokens, triton.cdiv(n_heads, HEADS))](
        values_YTHC,
        statistics_YTH2,
        batch.tile_row_X,
        batch.tile_start_X,
        batch.tile_position_X,
        batch.tile_length_X,
        out_THC,
        n_tokens,
        N_HEADS=n_heads,
        HEAD_DIM=head_dim,
        PADDED=padded_dim(head_dim),
        TILE_TOKENS=batch.tile_tokens,
        WINDOW=spec.window or 0,
        SPLIT=SPLIT,
        HEADS=HEADS,
        **ROW_LAUNCH.options,
    )
