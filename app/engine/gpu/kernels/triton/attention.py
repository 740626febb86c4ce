"""Paged attention in Triton: one kernel for prefill and decode, fixed splits, an ordered merge.

a sequence   |0 ............ 511|512 ........ 1023|1024 .. |      splits of SPLIT positions, from position 0 on
    a split      |64|64|64|64|64|64|64|64|                            reduced in order, tile by tile of 64 or 32
    a row        merges its splits in order

The bits of a row depend on its own tokens only: tiles and splits start at position 0 whatever the step holds, masked
positions leave the sums of a row unchanged (times 1, plus 0), and the result is the same whether one program processes
the splits of a row sequentially or several programs process one each, followed by a separate merge kernel.

What a step has to compute is listed on the device (divide_kernel), so that a fixed number of programs, as a captured
step has, shares the work of any step: padding costs nothing, nor do splits that a sequence is too short for.

Shape legend: T tokens, H query heads, K kv heads, G = H / K, C head_dim (padded), R rows of a program (tokens times G,
with the heads of a token adjacent), L positions of a tile, X query tiles.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.gpu.kernels.interface import (
    FEW_PROGRAMS,
    HEADS,
    PROGRAMS,
    ROW_LAUNCH,
    ROWS,
    SHARED_BYTES,
    SPLIT,
    AttentionBatch,
    AttentionWork,
    attention_launch,
    padded_dim,
)

LOG2_E = tl.constexpr(1.4426950408889634)

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
def add_sink(max_R, sum_R, out_RC, sink_R):
    """Adds a score without a value to a partial softmax; `max_R` is not needed afterwards."""
    new_max_R = tl.maximum(max_R, sink_R)
    safe_max_R = tl.where(new_max_R == float("-inf"), 0.0, new_max_R)
    scale_R = tl.exp2(max_R - safe_max_R)
    return sum_R * scale_R + tl.exp2(sink_R - safe_max_R), out_RC * scale_R[:, None]


@triton.jit
def normalize(max_R, sum_R, out_RC, sink_ptr, head_R, valid_R, HAS_SINKS: tl.constexpr):
    """Divides values by the sum of their weights; a row without keys is padding, and must not divide by 0.

    The sink of a row's head joins the sum here, after all splits: once, however they were computed. Adding 0 takes the
    sign from a zero, which merging takes from it, too.
    """
    if HAS_SINKS:
        sink_R = tl.load(sink_ptr + head_R, mask=valid_R, other=0.0).to(tl.float32) * LOG2_E
        sum_R, out_RC = add_sink(max_R, sum_R, out_RC, sink_R)
    return out_RC / tl.where(sum_R == 0.0, 1.0, sum_R)[:, None] + 0.0


@triton.jit
def merge_kernel(
    values_ptr,
    statistics_ptr,
    partials_ptr,
    start_ptr,
    position_ptr,
    length_ptr,
    sink_ptr,
    out_ptr,
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merges some heads of a divided tile, each token over the splits that it attends to."""
    tile = tl.program_id(0)
    partial = tl.load(partials_ptr + tile).to(tl.int64)
    if partial < 0:
        return
    start, position, length = tl.load(start_ptr + tile), tl.load(position_ptr + tile), tl.load(length_ptr + tile)
    head_R, column_C = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, PADDED)
    valid_R = head_R < N_HEADS
    valid_RC = valid_R[:, None] & (column_C < HEAD_DIM)[None, :]
    tile_split = _first_split(position, WINDOW, SPLIT)
    for step in range(length):
        max_R, sum_R = tl.full((HEADS,), float("-inf"), tl.float32), tl.zeros((HEADS,), tl.float32)
        out_RC = tl.zeros((HEADS, PADDED), tl.float32)
        for split in range(_first_split(position + step, WINDOW, SPLIT), (position + step) // SPLIT + 1):
            index_R = (partial + (split - tile_split) * length + step) * N_HEADS + head_R
            other_max_R = tl.load(statistics_ptr + 2 * index_R, mask=valid_R, other=0.0)
            other_sum_R = tl.load(statistics_ptr + 2 * index_R + 1, mask=valid_R, other=1.0)
            value_ptr = values_ptr + index_R[:, None] * HEAD_DIM + column_C[None, :]
            other_out_RC = tl.load(value_ptr, mask=valid_RC, other=0.0)
            max_R, sum_R, out_RC = merge_softmax(max_R, sum_R, out_RC, other_max_R, other_sum_R, other_out_RC)
        out_RC = normalize(max_R, sum_R, out_RC, sink_ptr, head_R, valid_R, HAS_SINKS).to(out_ptr.dtype.element_ty)
        index_R = ((start + step).to(tl.int64) * N_HEADS + head_R) * HEAD_DIM
        tl.store(out_ptr + index_R[:, None] + column_C[None, :], out_RC, mask=valid_RC)


@triton.jit
def _first_split(position, WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """The first split that the token at this position attends to."""
    return tl.maximum(position - WINDOW + 1, 0) // SPLIT if WINDOW else position * 0


@triton.jit
def _slots(table_ptr, block, position_L, BLOCK: tl.constexpr, POSITIONS: tl.constexpr, stop):
    """Cache slots of these positions. block: their block, if one block holds a whole tile."""
    if BLOCK % POSITIONS == 0:
        return block.to(tl.int64) * BLOCK + position_L % BLOCK
    block_L = tl.load(table_ptr + position_L // BLOCK, mask=position_L < stop, other=0).to(tl.int64)
    return block_L * BLOCK + position_L % BLOCK


@triton.jit
def _scores(q_RC, k_LC, key_position_L, valid_L, position_R, scale, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr):
    """Scores to the base 2, -inf where masked. scale: with a soft cap, to the base of 2 scores / cap."""
    scores_RL = tl.dot(q_RC, tl.trans(k_LC), input_precision="ieee") * scale
    if SOFT_CAP > 0:  # tanh u is 1 - 2 / (1 + exp(2 u))
        scores_RL = (1.0 - 2.0 / (1.0 + tl.exp2(scores_RL))) * (SOFT_CAP * LOG2_E)
    visible_RL = valid_L[None, :] & (key_position_L[None, :] <= position_R[:, None])
    if WINDOW:
        visible_RL = visible_RL & (key_position_L[None, :] > position_R[:, None] - WINDOW)
    return tl.where(visible_RL, scores_RL, float("-inf"))


@triton.jit
def _split(
    q_RC, position_R, table_ptr, k_ptr, value_offset, split, start, stop, scale,
    SLOT: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    SPLIT: tl.constexpr, POSITIONS: tl.constexpr,
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
        scores_RL = _scores(q_RC, k_LC, key_position_L, valid_L, position_R, scale, WINDOW, SOFT_CAP)
        new_max_R = tl.maximum(max_R, tl.max(scores_RL, axis=1))
        safe_max_R = tl.where(new_max_R == float("-inf"), 0.0, new_max_R)
        weights_RL = tl.exp2(scores_RL - safe_max_R[:, None])
        scale_R = tl.exp2(max_R - safe_max_R)
        sum_R = sum_R * scale_R + tl.sum(weights_RL, axis=1)
        out_RC = tl.dot(weights_RL.to(v_LC.dtype), v_LC, out_RC * scale_R[:, None], input_precision="ieee")
        max_R = new_max_R
        block = next_block
    return max_R, sum_R, out_RC


@triton.jit
def _attend(
    q_ptr, cache_ptr, rows_ptr, sink_ptr, values_ptr, statistics_ptr, value_offset, scale,
    first_row, kv_head, token, position, length, split, partial,
    N_HEADS: tl.constexpr, N_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    POSITIONS: tl.constexpr, HAS_SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Some rows of a tile with one kv head: all splits into q, or one (not negative) into values and statistics."""
    GROUP: tl.constexpr = N_HEADS // N_KV_HEADS
    step_R, head_R = (first_row + tl.arange(0, ROWS)) // GROUP, (first_row + tl.arange(0, ROWS)) % GROUP
    valid_R = step_R < length
    position_R = tl.where(valid_R, position + step_R, -1)
    column_C = tl.arange(0, PADDED)
    valid_RC = valid_R[:, None] & (column_C < HEAD_DIM)[None, :]
    index_R = (token + step_R).to(tl.int64) * N_HEADS + kv_head * GROUP + head_R
    q_RC = tl.load(q_ptr + index_R[:, None] * HEAD_DIM + column_C[None, :], mask=valid_RC, other=0.0)
    stop = position + tl.minimum(length, (first_row + ROWS - 1) // GROUP + 1)
    start = tl.maximum(position + first_row // GROUP - WINDOW + 1, 0) if WINDOW else 0
    first, last = start // SPLIT, tl.cdiv(stop, SPLIT)
    if HAS_SPLITS and split >= 0:
        first, last = tl.maximum(first, split), tl.minimum(last, split + 1)
    max_R, sum_R, out_RC = _split(
        q_RC, position_R, rows_ptr, cache_ptr + kv_head * HEAD_DIM, value_offset, first, start, stop, scale,
        N_KV_HEADS * HEAD_DIM, BLOCK, HEAD_DIM, WINDOW, SOFT_CAP, SPLIT, POSITIONS,
    )  # fmt: skip
    if HAS_SPLITS:
        for other in range(first + 1, last):
            other_max_R, other_sum_R, other_out_RC = _split(
                q_RC, position_R, rows_ptr, cache_ptr + kv_head * HEAD_DIM, value_offset, other, start, stop, scale,
                N_KV_HEADS * HEAD_DIM, BLOCK, HEAD_DIM, WINDOW, SOFT_CAP, SPLIT, POSITIONS,
            )  # fmt: skip
            max_R, sum_R, out_RC = merge_softmax(max_R, sum_R, out_RC, other_max_R, other_sum_R, other_out_RC)
    if HAS_SPLITS and split >= 0:
        row_R = partial.to(tl.int64) + (split - _first_split(position, WINDOW, SPLIT)) * length + step_R
        partial_R = row_R * N_HEADS + kv_head * GROUP + head_R
        tl.store(statistics_ptr + 2 * partial_R, max_R, mask=valid_R)
        tl.store(statistics_ptr + 2 * partial_R + 1, sum_R, mask=valid_R)
        tl.store(values_ptr + partial_R[:, None] * HEAD_DIM + column_C[None, :], out_RC, mask=valid_RC)
    else:
        query_head_R = kv_head * GROUP + head_R
        normal_RC = normalize(max_R, sum_R, out_RC, sink_ptr, query_head_R, valid_R, HAS_SINKS).to(q_RC.dtype)
        tl.store(q_ptr + index_R[:, None] * HEAD_DIM + column_C[None, :], normal_RC, mask=valid_RC)


@triton.jit
def attention_kernel(
    q_ptr, cache_ptr, table_ptr, row_ptr, start_ptr, position_ptr, length_ptr, count_ptr, items_ptr, partials_ptr,
    sink_ptr, values_ptr, statistics_ptr, value_offset, scale,
    N_HEADS: tl.constexpr, N_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, TABLE: tl.constexpr, TILE_TOKENS: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, POSITIONS: tl.constexpr, HAS_WORK: tl.constexpr,
    HAS_SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Every n-th item of the work, for n programs; without work the one tile of the program's number."""
    GROUP: tl.constexpr = N_HEADS // N_KV_HEADS
    PARTS: tl.constexpr = (TILE_TOKENS * GROUP + ROWS - 1) // ROWS
    program, first_row = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS * ROWS
    count = tl.load(count_ptr) if HAS_WORK else program + 1
    for index in range(program, count, tl.num_programs(0) // PARTS):
        if HAS_WORK:
            item_ptr = items_ptr + 2 * (count - 1 - index)  # the end of a prompt has the most work: start it first
            tile, split = tl.load(item_ptr), tl.load(item_ptr + 1)
            partial = tl.load(partials_ptr + tile)
        else:
            tile, split, partial = index, -1, index
        row, length = tl.load(row_ptr + tile), tl.load(length_ptr + tile)
        if (row >= 0) & (first_row // GROUP < length):
            _attend(
                q_ptr, cache_ptr, table_ptr + row.to(tl.int64) * TABLE, sink_ptr, values_ptr, statistics_ptr,
                value_offset, scale, first_row, tl.program_id(1), tl.load(start_ptr + tile),
                tl.load(position_ptr + tile), length, split, partial,
                N_HEADS, N_KV_HEADS, HEAD_DIM, PADDED, BLOCK, WINDOW, SOFT_CAP, ROWS, SPLIT, POSITIONS,
                HAS_SPLITS, HAS_SINKS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["n_tiles", "capacity", "few_tiles"])
def divide_kernel(
    row_ptr, position_ptr, length_ptr, count_ptr, items_ptr, partials_ptr, n_tiles, capacity, few_tiles,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The items of one tile, which follow the items of earlier tiles. capacity: of the partial results, in tokens."""
    tile = tl.program_id(0)
    live = 0
    for first in range(0, n_tiles, TILES):
        index_X = first + tl.arange(0, TILES)
        live += tl.sum((tl.load(row_ptr + index_X, mask=index_X < n_tiles, other=-1) >= 0).to(tl.int32), 0)
    most_tokens = tl.where(live <= few_tiles, 1 << 30, 1)
    n_items, n_partials, own_items, own_partials, own_start = 0, 0, 0, 0, 0
    for first in range(0, tile + 1, TILES):
        index_X = first + tl.arange(0, TILES)
        valid_X = index_X <= tile
        row_X = tl.load(row_ptr + index_X, mask=valid_X, other=-1)
        position_X = tl.load(position_ptr + index_X, mask=valid_X, other=0)
        length_X = tl.load(length_ptr + index_X, mask=valid_X, other=1)
        splits_X = (position_X + length_X - 1) // SPLIT + 1 - _first_split(position_X, WINDOW, SPLIT)
        is_long_X = (row_X >= 0) & (splits_X > 1) & (length_X <= most_tokens)
        partials_X = tl.where(is_long_X, splits_X * length_X, 0)
        until_X = n_partials + tl.cumsum(partials_X, 0)
        is_divided_X = is_long_X & (until_X <= capacity)
        items_X = tl.where(row_X >= 0, tl.where(is_divided_X, splits_X, 1), 0)
        own_X = index_X == tile
        own_items += tl.sum(tl.where(own_X, items_X, 0), 0)
        own_partials += tl.sum(tl.where(own_X & is_divided_X, splits_X, 0), 0)
        own_start += tl.sum(tl.where(own_X, until_X - partials_X, 0), 0)
        n_items += tl.sum(items_X, 0)
        n_partials += tl.sum(partials_X, 0)
    is_divided = own_partials > 0
    tl.store(partials_ptr + tile, tl.where(is_divided, own_start, -1))
    first_split = _first_split(tl.load(position_ptr + tile), WINDOW, SPLIT)
    for item in range(own_items):
        item_ptr = items_ptr + 2 * (n_items - own_items + item)
        tl.store(item_ptr, tile)
        tl.store(item_ptr + 1, tl.where(is_divided, first_split + item, -1))
    if tile == n_tiles - 1:
        tl.store(count_ptr, n_items)


_TILES = 256
"""Tiles that divide_kernel looks at together."""


def divide_attention(
    batch: AttentionBatch, n_heads: int, n_kv_heads: int, head_dim: int, window: int, partial_bytes: int
) -> AttentionBatch:
    """See Kernels.divide_attention. partial_bytes: workspace limit; the bits do not depend on it."""
    if batch.tile_tokens == 1 and batch.max_splits == 1:
        return batch
    n_tiles = len(batch.tile_row_X)
    most_partials = n_tiles * batch.tile_tokens * batch.max_splits if batch.max_splits > 1 else 0
    capacity = min(most_partials, partial_bytes // (4 * n_heads * (head_dim + 2)))
    sizes = ((1,), (n_tiles + capacity, 2), (n_tiles,))
    work = AttentionWork(*(batch.tile_row_X.new_empty(size) for size in sizes))
    divide_kernel[(n_tiles,)](
        batch.tile_row_X, batch.tile_position_X, batch.tile_length_X, *work, n_tiles, capacity,
        FEW_PROGRAMS // (_parts(batch, n_heads, n_kv_heads) * n_kv_heads),
        WINDOW=window, SPLIT=SPLIT, TILES=_TILES, **ROW_LAUNCH,
    )  # fmt: skip
    return replace(batch, work=work)


def _parts(batch: AttentionBatch, n_heads: int, n_kv_heads: int) -> int:
    """Programs for a tile and kv head."""
    return -(-batch.tile_tokens * (n_heads // n_kv_heads) // ROWS)


def attention(
    q_THC: Tensor,
    layer_cache: Tensor,
    batch: AttentionBatch,
    window: int,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
    shared_bytes: int = SHARED_BYTES,
) -> Tensor:
    """See Kernels.attention. shared_bytes: shared memory limit of a program; the bits do not depend on it.

    No two programs that write to q read the same rows of it, so the result can overwrite them.
    """
    assert q_THC.is_contiguous() and layer_cache.is_contiguous() and batch.block_table_RB.is_contiguous()
    (_, n_heads, head_dim), n_kv_heads = q_THC.shape, layer_cache.shape[3]
    n_tiles, parts, work = len(batch.tile_row_X), _parts(batch, n_heads, n_kv_heads), batch.work
    programs, capacity = n_tiles, 0
    if work:
        programs, capacity = min(len(work.items_X2), -(-PROGRAMS // (parts * n_kv_heads))), len(work.items_X2) - n_tiles
    values_XHC, statistics_XH2 = (
        q_THC.new_empty(capacity, n_heads, size, dtype=torch.float32) for size in (head_dim, 2)
    )
    sizes = {"HEAD_DIM": head_dim, "PADDED": padded_dim(head_dim), "WINDOW": window, "SPLIT": SPLIT}
    sinks, has_sinks = q_THC if sinks_H is None else sinks_H, sinks_H is not None
    tiles = (batch.tile_start_X, batch.tile_position_X, batch.tile_length_X)
    scale = head_dim**-0.5 * LOG2_E.value * (2 / soft_cap if soft_cap else 1.0)
    attention_kernel[(programs * parts, n_kv_heads)](
        q_THC, layer_cache, batch.block_table_RB, batch.tile_row_X, *tiles, *(work or (batch.tile_row_X,) * 3),
        sinks, values_XHC, statistics_XH2, layer_cache.stride(0), scale,
        N_HEADS=n_heads, N_KV_HEADS=n_kv_heads, BLOCK=layer_cache.shape[2], TABLE=batch.block_table_RB.shape[1],
        TILE_TOKENS=batch.tile_tokens, ROWS=ROWS, SOFT_CAP=soft_cap,
        HAS_WORK=work is not None, HAS_SPLITS=batch.max_splits > 1, HAS_SINKS=has_sinks,
        **sizes, **attention_launch(padded_dim(head_dim), q_THC.element_size(), shared_bytes),
    )  # fmt: skip
    if work and capacity:
        merge_kernel[(n_tiles, triton.cdiv(n_heads, HEADS))](
            values_XHC, statistics_XH2, work.partials_X, *tiles, sinks, q_THC,
            N_HEADS=n_heads, HEADS=HEADS, HAS_SINKS=has_sinks, **sizes, **ROW_LAUNCH,
        )  # fmt: skip
    return q_THC
