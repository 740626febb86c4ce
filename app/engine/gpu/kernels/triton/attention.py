"""Paged attention in Triton: one kernel for prefill and decode, fixed splits, an ordered merge.

a sequence   |0 ............ 511|512 ........ 1023|1024 .. |      splits of SPLIT positions, from position 0 on
    a split      |64|64|64|64|64|64|64|64|                            reduced in order, tile by tile
    a row        merges its splits in order

The bits of a row depend on its own tokens only: tiles and splits start at position 0 whatever the step holds, masked
positions leave the sums of a row unchanged (times 1, plus 0), and the result is the same whether one program processes
the splits of a row sequentially or several programs process one each, followed by a separate merge kernel.

Shape legend: T tokens, H query heads, K kv heads, G = H / K, C head_dim (padded), R rows of a program (tokens times G,
with the heads of a token adjacent), L positions of a tile, X query tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.gpu.kernels.interface import (
    HEADS,
    PARTIAL_BYTES,
    POSITIONS,
    ROW_LAUNCH,
    ROWS,
    SHARED_BYTES,
    SPLIT,
    AttentionBatch,
    attention_launch,
    padded_dim,
)

# Shape legend: T tokens, H query heads, C head_dim (padded), Y splits, X query tiles, R heads of a program.


@triton.jit
def merge_softmax(max_R, sum_R, out_RC, other_max_R, other_sum_R, other_out_RC):
    """Merges two partial softmaxes (maximum, sum, values); an empty one (maximum -inf) leaves the other unchanged."""
    new_max_R = tl.maximum(max_R, other_max_R)
    safe_max_R = tl.where(new_max_R == float("-inf"), 0.0, new_max_R)
    scale_R, other_scale_R = tl.exp2(max_R - safe_max_R), tl.exp2(other_max_R - safe_max_R)
    sum_R = sum_R * scale_R + other_sum_R * other_scale_R
    return new_max_R, sum_R, out_RC * scale_R[:, None] + other_out_RC * other_scale_R[:, None]


@triton.jit
def normalize(out_RC, sum_R):
    """Divides values by the sum of their weights; a row without keys is padding, and must not divide by 0."""
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
    """Merges some heads of one token, over the splits that it attends to."""
    tile, step = tl.program_id(0) // TILE_TOKENS, tl.program_id(0) % TILE_TOKENS
    if (tl.load(row_ptr + tile) < 0) | (step >= tl.load(length_ptr + tile)):
        return
    token, position = tl.load(start_ptr + tile) + step, tl.load(position_ptr + tile) + step
    head_R, column_C = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, PADDED)
    valid_R = head_R < N_HEADS
    valid_RC = valid_R[:, None] & (column_C < HEAD_DIM)[None, :]
    max_R, sum_R = tl.full((HEADS,), float("-inf"), tl.float32), tl.zeros((HEADS,), tl.float32)
    out_RC = tl.zeros((HEADS, PADDED), tl.float32)
    first = tl.maximum(position - WINDOW + 1, 0) // SPLIT if WINDOW else 0
    for split in range(first, position // SPLIT + 1):
        index_R = (split * n_tokens.to(tl.int64) + token) * N_HEADS + head_R
        other_max_R = tl.load(statistics_ptr + 2 * index_R, mask=valid_R, other=0.0)
        other_sum_R = tl.load(statistics_ptr + 2 * index_R + 1, mask=valid_R, other=1.0)
        other_out_RC = tl.load(values_ptr + index_R[:, None] * HEAD_DIM + column_C[None, :], mask=valid_RC, other=0.0)
        max_R, sum_R, out_RC = merge_softmax(max_R, sum_R, out_RC, other_max_R, other_sum_R, other_out_RC)
    out_RC = normalize(out_RC, sum_R).to(out_ptr.dtype.element_ty)
    index_R = (token.to(tl.int64) * N_HEADS + head_R) * HEAD_DIM
    tl.store(out_ptr + index_R[:, None] + column_C[None, :], out_RC, mask=valid_RC)


def merge_partials(
    values_YTHC: Tensor, statistics_YTH2: Tensor, out_THC: Tensor, batch: AttentionBatch, window: int
) -> None:
    """Merges into out_THC, for every token of a tile. Statistics: maximum (base 2) and sum of each split."""
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
        WINDOW=window,
        SPLIT=SPLIT,
        HEADS=HEADS,
        **ROW_LAUNCH,
    )


_LOG2_E = 1.4426950408889634


@triton.jit
def _slots(table_ptr, block, position_L, BLOCK: tl.constexpr, POSITIONS: tl.constexpr, stop):
    """Cache slots of these positions. block: their block, if one block holds a whole tile."""
    if BLOCK % POSITIONS == 0:
        return block.to(tl.int64) * BLOCK + position_L % BLOCK
    block_L = tl.load(table_ptr + position_L // BLOCK, mask=position_L < stop, other=0).to(tl.int64)
    return block_L * BLOCK + position_L % BLOCK


@triton.jit
def _scores(q_RC, k_LC, key_position_L, valid_L, position_R, scale, WINDOW: tl.constexpr):
    """Scores to the base 2, -inf where masked."""
    scores_RL = tl.dot(q_RC, tl.trans(k_LC), input_precision="ieee") * scale
    visible_RL = valid_L[None, :] & (key_position_L[None, :] <= position_R[:, None])
    if WINDOW:
        visible_RL = visible_RL & (key_position_L[None, :] > position_R[:, None] - WINDOW)
    return tl.where(visible_RL, scores_RL, float("-inf"))


@triton.jit
def _split(
    q_RC, position_R, table_ptr, k_ptr, value_offset, split, start, stop, scale,
    SLOT: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """(maximum [R], sum [R], values [R, C]) of the rows over one split. start, stop: positions visible to any row."""
    max_R = tl.full((q_RC.shape[0],), float("-inf"), tl.float32)
    sum_R = tl.zeros((q_RC.shape[0],), tl.float32)
    out_RC = tl.zeros(q_RC.shape, tl.float32)
    column_C = tl.arange(0, q_RC.shape[1])
    first = tl.maximum(split * SPLIT, start) // POSITIONS
    last = tl.cdiv(tl.minimum(split * SPLIT + SPLIT, stop), POSITIONS)
    # Load the block table one tile ahead: loaded where it is used, it would occupy one of the pipeline stages for keys
    # and values, and every tile would wait for its own loads.
    block = tl.load(table_ptr + tl.minimum(first, last - 1) * POSITIONS // BLOCK)
    for tile in range(first, last):
        next_block = tl.load(table_ptr + tl.minimum(tile + 1, last - 1) * POSITIONS // BLOCK)
        key_position_L = tile * POSITIONS + tl.arange(0, POSITIONS)
        valid_L = (key_position_L >= start) & (key_position_L < stop)
        offset_LC = _slots(table_ptr, block, key_position_L, BLOCK, POSITIONS, stop)[:, None] * SLOT + column_C[None, :]
        valid_LC = valid_L[:, None] & (column_C < HEAD_DIM)[None, :]
        k_LC = tl.load(k_ptr + offset_LC, mask=valid_LC, other=0.0)
        v_LC = tl.load(k_ptr + value_offset + offset_LC, mask=valid_LC, other=0.0)
        scores_RL = _scores(q_RC, k_LC, key_position_L, valid_L, position_R, scale, WINDOW)
        new_max_R = tl.maximum(max_R, tl.max(scores_RL, axis=1))
        safe_max_R = tl.where(new_max_R == float("-inf"), 0.0, new_max_R)
        weights_RL = tl.exp2(scores_RL - safe_max_R[:, None])
        scale_R = tl.exp2(max_R - safe_max_R)
        sum_R = sum_R * scale_R + tl.sum(weights_RL, axis=1)
        out_RC = tl.dot(weights_RL.to(v_LC.dtype), v_LC, out_RC * scale_R[:, None], input_precision="ieee")
        max_R = new_max_R
        block = next_block
    return max_R, sum_R, out_RC


@triton.jit(do_not_specialize=["n_tokens"])
def attention_kernel(
    q_ptr, cache_ptr, table_ptr, row_ptr, start_ptr, position_ptr, length_ptr, values_ptr, statistics_ptr,
    value_offset, n_tokens, scale,
    N_HEADS: tl.constexpr, N_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, TABLE: tl.constexpr, TILE_TOKENS: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, POSITIONS: tl.constexpr, PARALLEL_SPLITS: tl.constexpr,
):  # fmt: skip
    """Some rows of a tile with one kv head: all splits into q, or (PARALLEL_SPLITS) one into values and statistics."""
    GROUP: tl.constexpr = N_HEADS // N_KV_HEADS
    PARTS: tl.constexpr = (TILE_TOKENS * GROUP + ROWS - 1) // ROWS
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the end of a prompt has the most work: start it first
    tile, first_row, kv_head = program // PARTS, program % PARTS * ROWS, tl.program_id(1)
    row, length, position = tl.load(row_ptr + tile), tl.load(length_ptr + tile), tl.load(position_ptr + tile)
    if (row < 0) | (first_row // GROUP >= length):
        return
    stop = position + tl.minimum(length, (first_row + ROWS - 1) // GROUP + 1)
    start = tl.maximum(position + first_row // GROUP - WINDOW + 1, 0) if WINDOW else 0
    if PARALLEL_SPLITS and ((tl.program_id(2) * SPLIT >= stop) | (tl.program_id(2) * SPLIT + SPLIT <= start)):
        return
    step_R, head_R = (first_row + tl.arange(0, ROWS)) // GROUP, (first_row + tl.arange(0, ROWS)) % GROUP
    valid_R = step_R < length
    position_R = tl.where(valid_R, position + step_R, -1)
    column_C = tl.arange(0, PADDED)
    valid_RC = valid_R[:, None] & (column_C < HEAD_DIM)[None, :]
    index_R = (tl.load(start_ptr + tile) + step_R).to(tl.int64) * N_HEADS + kv_head * GROUP + head_R
    q_RC = tl.load(q_ptr + index_R[:, None] * HEAD_DIM + column_C[None, :], mask=valid_RC, other=0.0)
    rows_ptr = table_ptr + row.to(tl.int64) * TABLE
    k_ptr = cache_ptr + kv_head * HEAD_DIM
    if PARALLEL_SPLITS:
        max_R, sum_R, out_RC = _split(
            q_RC, position_R, rows_ptr, k_ptr, value_offset, tl.program_id(2), start, stop, scale,
            N_KV_HEADS * HEAD_DIM, BLOCK, HEAD_DIM, WINDOW, SPLIT, POSITIONS,
        )  # fmt: skip
        index_R += tl.program_id(2).to(tl.int64) * n_tokens * N_HEADS
        tl.store(statistics_ptr + 2 * index_R, max_R, mask=valid_R)
        tl.store(statistics_ptr + 2 * index_R + 1, sum_R, mask=valid_R)
        tl.store(values_ptr + index_R[:, None] * HEAD_DIM + column_C[None, :], out_RC, mask=valid_RC)
    else:
        max_R, sum_R = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
        out_RC = tl.zeros((ROWS, PADDED), tl.float32)
        for split in range(start // SPLIT, tl.cdiv(stop, SPLIT)):
            other_max_R, other_sum_R, other_out_RC = _split(
                q_RC, position_R, rows_ptr, k_ptr, value_offset, split, start, stop, scale,
                N_KV_HEADS * HEAD_DIM, BLOCK, HEAD_DIM, WINDOW, SPLIT, POSITIONS,
            )  # fmt: skip
            max_R, sum_R, out_RC = merge_softmax(max_R, sum_R, out_RC, other_max_R, other_sum_R, other_out_RC)
        out_RC = normalize(out_RC, sum_R).to(q_RC.dtype)
        tl.store(q_ptr + index_R[:, None] * HEAD_DIM + column_C[None, :], out_RC, mask=valid_RC)


def attention(
    q_THC: Tensor,
    layer_cache: Tensor,
    batch: AttentionBatch,
    window: int | None,
    partial_bytes: int = PARTIAL_BYTES,
    shared_bytes: int = SHARED_BYTES,
) -> Tensor:
    """See Kernels.attention. partial_bytes: workspace limit, shared_bytes: shared memory limit of a program.

    The bits depend on neither. No two programs read the same rows of q, so the result can overwrite them.
    """
    assert q_THC.is_contiguous() and layer_cache.is_contiguous() and batch.block_table_RB.is_contiguous()
    (n_tokens, n_heads, head_dim), n_kv_heads = q_THC.shape, layer_cache.shape[3]
    n_partials = batch.max_splits * n_tokens * n_heads
    is_parallel = batch.max_splits > 1 and n_partials * (head_dim + 2) * 4 <= partial_bytes
    values_YTHC, statistics_YTH2 = (
        q_THC.new_empty(n_partials * is_parallel * size, dtype=torch.float32) for size in (head_dim, 2)
    )
    parts = triton.cdiv(batch.tile_tokens * (n_heads // n_kv_heads), ROWS)
    attention_kernel[(len(batch.tile_row_X) * parts, n_kv_heads, batch.max_splits if is_parallel else 1)](
        q_THC, layer_cache, batch.block_table_RB,
        batch.tile_row_X, batch.tile_start_X, batch.tile_position_X, batch.tile_length_X,
        values_YTHC, statistics_YTH2,
        layer_cache.stride(0), n_tokens, head_dim**-0.5 * _LOG2_E,
        N_HEADS=n_heads, N_KV_HEADS=n_kv_heads, HEAD_DIM=head_dim, PADDED=padded_dim(head_dim),
        BLOCK=layer_cache.shape[2], TABLE=batch.block_table_RB.shape[1], TILE_TOKENS=batch.tile_tokens,
        WINDOW=window or 0, ROWS=ROWS, SPLIT=SPLIT, POSITIONS=POSITIONS,
        PARALLEL_SPLITS=is_parallel,
        **attention_launch(padded_dim(head_dim), q_THC.element_size(), shared_bytes),
    )  # fmt: skip
    if is_parallel:
        merge_partials(values_YTHC, statistics_YTH2, q_THC, batch, window or 0)
    return q_THC
