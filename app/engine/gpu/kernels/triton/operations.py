"""Triton kernels around the matrix products: norms, rotary positions with the cache write, lookup."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.gpu.kernels.interface import (
    HEADS,
    LOOKUP_ROWS,
    PARTIAL_BYTES,
    ROW_LAUNCH,
    SHARED_BYTES,
    AttentionBatch,
    HeadsSpec,
    NormSpec,
    RowLookup,
    RowState,
    norm_launch,
    padded_dim,
    power_of_two,
)
from app.engine.gpu.kernels.sample_out import ALIGNED
from app.engine.gpu.kernels.triton.activations import gate
from app.engine.gpu.kernels.triton.attention import attention, divide_attention
from app.engine.gpu.kernels.triton.experts import compute_experts, route
from app.engine.gpu.kernels.triton.sampler import sample

# One program computes a whole row, so that its bits depend on nothing else. Shape legend: T tokens, D width, W the next
# power of two.


@triton.jit
def norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    normed_ptr,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    KIND: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One row: writes x + delta to sum_ptr if there is a delta, and its norm to normed_ptr if KIND is not none."""
    column_W = tl.arange(0, PADDED)
    valid_W = column_W < WIDTH
    offset_W = tl.program_id(0).to(tl.int64) * WIDTH + column_W
    x_W = tl.load(x_ptr + offset_W, mask=valid_W, other=0.0)
    if HAS_DELTA:
        delta_W = tl.load(delta_ptr + offset_W, mask=valid_W, other=0.0)
        x_W = (x_W.to(tl.float32) + delta_W.to(tl.float32)).to(x_W.dtype)  # rounded, as torch rounds it
        tl.store(sum_ptr + offset_W, x_W, mask=valid_W)
    if KIND != "none":
        wide_W = x_W.to(tl.float32)
        if KIND == "layernorm":
            wide_W = tl.where(valid_W, wide_W - tl.sum(wide_W, axis=0) / WIDTH, 0.0)
        wide_W = wide_W * tl.rsqrt(tl.sum(wide_W * wide_W, axis=0) / WIDTH + eps)
        if HAS_WEIGHT:
            wide_W = wide_W * tl.load(weight_ptr + column_W, mask=valid_W, other=0.0).to(tl.float32)
        if HAS_BIAS:
            wide_W = wide_W + tl.load(bias_ptr + column_W, mask=valid_W, other=0.0).to(tl.float32)
        tl.store(normed_ptr + offset_W, wide_W.to(x_W.dtype), mask=valid_W)


def add_norm(
    x_TD: Tensor, delta_TD: Tensor | None, norm: NormSpec, out_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See Kernels.add_norm."""
    assert x_TD.is_contiguous() and (delta_TD is None or delta_TD.is_contiguous())
    if delta_TD is None and norm.kind == "none":
        return x_TD, x_TD if out_TD is None else out_TD.copy_(x_TD)
    normed_TD = torch.empty_like(x_TD) if out_TD is None else out_TD
    sum_TD = x_TD if delta_TD is None else normed_TD if norm.kind == "none" else torch.empty_like(x_TD)
    width = x_TD.shape[1]
    norm_kernel[(len(x_TD),)](
        x_TD,
        x_TD if delta_TD is None else delta_TD,
        x_TD if norm.weight is None else norm.weight,
        x_TD if norm.bias is None else norm.bias,
        sum_TD,
        normed_TD,
        norm.eps,
        WIDTH=width,
        PADDED=power_of_two(width),
        KIND=norm.kind,
        HAS_DELTA=delta_TD is not None,
        HAS_WEIGHT=norm.weight is not None,
        HAS_BIAS=norm.bias is not None,
        **norm_launch(width),
    )
    return sum_TD, normed_TD


# One program prepares some heads of one token. Shape legend: T tokens, H query heads, K kv heads, C head_dim, N heads
# of a program, X columns of a head up to a power of two, P positions.
#
#     heads of qkv:  0 .. H-1 queries | H .. H+K-1 keys | H+K .. H+2K-1 values


@triton.jit
def _apply_norm(x_NX, scale_N, weight_NX, has_norm_N):
    """x times its head's scale and weights, rounded; heads without a norm stay unchanged."""
    wide_NX = x_NX.to(tl.float32)
    wide_NX = tl.where(has_norm_N[:, None], wide_NX * scale_N[:, None] * weight_NX, wide_NX)
    return wide_NX.to(x_NX.dtype).to(tl.float32)


@triton.jit
def _norm_weights(q_norm_ptr, k_norm_ptr, column_X, valid_X, is_q_N, HAS_Q: tl.constexpr, HAS_K: tl.constexpr):
    """[N, X] norm weights: the queries' for query heads, the keys' for all others."""
    q_X = tl.load(q_norm_ptr + column_X, mask=valid_X & HAS_Q, other=0.0).to(tl.float32)
    k_X = tl.load(k_norm_ptr + column_X, mask=valid_X & HAS_K, other=0.0).to(tl.float32)
    return tl.where(is_q_N[:, None], q_X[None, :], k_X[None, :])


@triton.jit
def _rope(rope_ptr, position, column_X, HALF: tl.constexpr):
    """Cosine of each column, and its sine with the sign of the other number of the pair."""
    angle_ptr = rope_ptr + position.to(tl.int64) * (2 * HALF) + column_X % HALF
    cos_X = tl.load(angle_ptr, mask=column_X < 2 * HALF, other=1.0)
    sin_X = tl.load(angle_ptr + HALF, mask=column_X < 2 * HALF, other=0.0)
    return cos_X, tl.where(column_X < HALF, -sin_X, sin_X)


@triton.jit
def _store_kv(
    cache_ptr,
    value_offset,
    slot,
    head_N,
    column_X,
    x_NX,
    store_mask_NX,
    N_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Writes keys and values to the cache; a negative slot writes nothing."""
    is_k_N = head_N < N_KV_HEADS
    kv_head_N = tl.where(is_k_N, head_N, head_N - N_KV_HEADS)
    offset_N = (slot * N_KV_HEADS + kv_head_N) * HEAD_DIM + tl.where(is_k_N, 0, value_offset)
    store_mask_NX = store_mask_NX & (slot >= 0)
    tl.store(cache_ptr + offset_N[:, None] + column_X[None, :], x_NX.to(cache_ptr.dtype.element_ty), mask=store_mask_NX)


@triton.jit
def _rotated(
    x_NX, from_ptr, q_norm_ptr, k_norm_ptr, rope_ptr, position, scale_N, column_X, valid_NX, is_q_N, is_k_N,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr,
    NORMS_AFTER: tl.constexpr,
):  # fmt: skip
    """x with queries and keys rotated, and rounded. from_ptr: of the heads before their norms.

    Number i is rotated with number i + HALF: the other number of each pair is loaded and normed again.
    """
    other_X = tl.where(column_X < HALF, column_X + HALF, tl.where(column_X < 2 * HALF, column_X - HALF, column_X))
    raw_NX = tl.load(from_ptr + other_X[None, :], mask=valid_NX, other=0.0)
    if NORMS_AFTER:
        other_NX = raw_NX.to(tl.float32)
    else:
        valid_X, has_norm_N = column_X < HEAD_DIM, (is_q_N & HAS_Q_NORM) | (is_k_N & HAS_K_NORM)
        weight_NX = _norm_weights(q_norm_ptr, k_norm_ptr, other_X, valid_X, is_q_N, HAS_Q_NORM, HAS_K_NORM)
        other_NX = _apply_norm(raw_NX, scale_N, weight_NX, has_norm_N)
    cos_X, sin_X = _rope(rope_ptr, position, column_X, HALF)
    rotated_NX = (x_NX * cos_X[None, :] + other_NX * sin_X[None, :]).to(raw_NX.dtype).to(tl.float32)
    return tl.where((is_q_N | is_k_N)[:, None] & (column_X < 2 * HALF)[None, :], rotated_NX, x_NX)


@triton.jit
def split_heads_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    position_ptr,
    rope_ptr,
    slot_ptr,
    query_scale_ptr,
    q_ptr,
    cache_ptr,
    value_offset,
    eps,
    q_factor,
    N_HEADS: tl.constexpr,
    N_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    NORMS_AFTER: tl.constexpr,
    HAS_QUERY_SCALE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """HALF: half of the rotated numbers, 0 for none. value_offset: numbers from a layer's keys to its values."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + token)
    head_N = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column_X = tl.arange(0, PADDED)
    is_q_N, is_k_N = head_N < N_HEADS, (head_N >= N_HEADS) & (head_N < N_HEADS + N_KV_HEADS)
    valid_X = column_X < HEAD_DIM
    valid_NX = (head_N < N_HEADS + 2 * N_KV_HEADS)[:, None] & valid_X[None, :]
    from_ptr = qkv_ptr + (token * (N_HEADS + 2 * N_KV_HEADS) + head_N[:, None]) * HEAD_DIM
    raw_NX = tl.load(from_ptr + column_X[None, :], mask=valid_NX, other=0.0)
    x_NX = raw_NX.to(tl.float32)
    scale_N = tl.rsqrt(tl.sum(x_NX * x_NX, axis=1) / HEAD_DIM + eps)
    has_norm_N = (is_q_N & HAS_Q_NORM) | (is_k_N & HAS_K_NORM)
    weight_NX = _norm_weights(q_norm_ptr, k_norm_ptr, column_X, valid_X, is_q_N, HAS_Q_NORM, HAS_K_NORM)
    if not NORMS_AFTER:
        x_NX = _apply_norm(raw_NX, scale_N, weight_NX, has_norm_N)
    if HALF:
        x_NX = _rotated(
            x_NX, from_ptr, q_norm_ptr, k_norm_ptr, rope_ptr, position, scale_N, column_X, valid_NX, is_q_N, is_k_N,
            HEAD_DIM, HALF, HAS_Q_NORM, HAS_K_NORM, NORMS_AFTER,
        )  # fmt: skip
    if NORMS_AFTER:
        scale_N = tl.rsqrt(tl.sum(x_NX * x_NX, axis=1) / HEAD_DIM + eps)
        x_NX = _apply_norm(x_NX.to(raw_NX.dtype), scale_N, weight_NX, has_norm_N)
    if HAS_QUERY_SCALE:
        query_scale = tl.load(query_scale_ptr + position.to(tl.int64))
        scaled_NX = (x_NX * query_scale).to(raw_NX.dtype).to(tl.float32)
        x_NX = tl.where(is_q_N[:, None], scaled_NX, x_NX)
    q_offset_N = (token * N_HEADS + head_N) * HEAD_DIM
    q_NX = (x_NX * q_factor).to(raw_NX.dtype)
    tl.store(q_ptr + q_offset_N[:, None] + column_X[None, :], q_NX, mask=valid_NX & is_q_N[:, None])
    store_mask_NX = valid_NX & (head_N >= N_HEADS)[:, None]
    slot = tl.load(slot_ptr + token).to(tl.int64)
    _store_kv(cache_ptr, value_offset, slot, head_N - N_HEADS, column_X, x_NX, store_mask_NX, N_KV_HEADS, HEAD_DIM)


def split_heads(
    qkv_TX: Tensor,
    spec: HeadsSpec,
    positions_T: Tensor,
    rope_PC: Tensor | None,
    layer_cache: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """See Kernels.split_heads."""
    assert qkv_TX.is_contiguous() and layer_cache.is_contiguous() and (rope_PC is None or rope_PC.is_contiguous())
    assert rope_PC is None or rope_PC.shape[1] == spec.turned_dim
    n_tokens, n_heads = len(qkv_TX), spec.n_heads + 2 * spec.n_kv_heads
    q_THC = torch.empty(n_tokens, spec.n_heads, spec.head_dim, dtype=qkv_TX.dtype, device=qkv_TX.device)
    split_heads_kernel[(n_tokens, triton.cdiv(n_heads, HEADS))](
        qkv_TX,
        qkv_TX if spec.q_norm is None else spec.q_norm,
        qkv_TX if spec.k_norm is None else spec.k_norm,
        positions_T,
        qkv_TX if rope_PC is None else rope_PC,
        slots_T,
        qkv_TX if spec.query_scale_P is None else spec.query_scale_P,
        q_THC,
        layer_cache,
        layer_cache.stride(0),
        spec.eps,
        spec.q_factor,
        N_HEADS=spec.n_heads,
        N_KV_HEADS=spec.n_kv_heads,
        HEAD_DIM=spec.head_dim,
        PADDED=padded_dim(spec.head_dim),
        HALF=0 if rope_PC is None else spec.turned_dim // 2,
        HAS_Q_NORM=spec.q_norm is not None,
        HAS_K_NORM=spec.k_norm is not None,
        NORMS_AFTER=spec.norms_after,
        HAS_QUERY_SCALE=spec.query_scale_P is not None,
        HEADS=HEADS,
        **ROW_LAUNCH,
    )
    return q_THC


# Shape legend: app/engine/gpu/kernels/interface.py.


@triton.jit(do_not_specialize=["n_tokens", "stride"])
def look_up_kernel(
    rows_ptr, lengths_ptr, tokens_ptr, table_ptr, last_ptr, out_ptr, n_tokens, stride,
    PADDING_ROW: tl.constexpr, TABLE: tl.constexpr, BLOCK: tl.constexpr, HAS_TOKENS: tl.constexpr,
    LOOKUP_ROWS: tl.constexpr,
):  # fmt: skip
    """Some tokens. Writes token, position, slot and tile row of each, `stride` numbers apart."""
    index_T = tl.program_id(0) * LOOKUP_ROWS + tl.arange(0, LOOKUP_ROWS)
    valid_T = index_T < n_tokens
    row_T = tl.load(rows_ptr + index_T, mask=valid_T, other=PADDING_ROW)
    position_T = tl.load(lengths_ptr + index_T, mask=valid_T, other=1) - 1
    block_T = tl.load(table_ptr + row_T.to(tl.int64) * TABLE + position_T // BLOCK)
    token_T = tl.load(last_ptr + row_T)
    if HAS_TOKENS:
        given_T = tl.load(tokens_ptr + index_T, mask=valid_T, other=0)
        token_T = tl.where(given_T >= 0, given_T, token_T)
    tl.store(out_ptr + index_T, token_T, mask=valid_T)
    tl.store(out_ptr + stride + index_T, position_T, mask=valid_T)
    tl.store(out_ptr + 2 * stride + index_T, block_T * BLOCK + position_T % BLOCK, mask=valid_T)
    tl.store(out_ptr + 3 * stride + index_T, tl.where(row_T == PADDING_ROW, -1, row_T), mask=valid_T)


def look_up(rows_T: Tensor, lengths_T: Tensor, tokens_T: Tensor | None, state: RowState) -> RowLookup:
    """See Kernels.look_up."""
    assert state.block_table_RB.is_contiguous()
    n_tokens = len(rows_T)
    out_XT = rows_T.new_empty(len(RowLookup._fields), -(-n_tokens // ALIGNED) * ALIGNED)
    look_up_kernel[(triton.cdiv(n_tokens, LOOKUP_ROWS),)](
        rows_T, lengths_T, rows_T if tokens_T is None else tokens_T, state.block_table_RB, state.last_token_R, out_XT,
        n_tokens, out_XT.stride(0),
        PADDING_ROW=len(state.block_table_RB) - 1, TABLE=state.block_table_RB.shape[1], BLOCK=state.block_size,
        HAS_TOKENS=tokens_T is not None, LOOKUP_ROWS=LOOKUP_ROWS, **ROW_LAUNCH,
    )  # fmt: skip
    return RowLookup(*out_XT[:, :n_tokens].unbind())


class TritonKernels:
    """`Kernels` in Triton. Every call launches and returns without waiting for the device."""

    look_up = staticmethod(look_up)
    add_norm = staticmethod(add_norm)
    split_heads = staticmethod(split_heads)
    gate = staticmethod(gate)
    route = staticmethod(route)
    experts = staticmethod(compute_experts)
    sample = staticmethod(sample)

    def __init__(self, partial_bytes: int = PARTIAL_BYTES, shared_bytes: int = SHARED_BYTES) -> None:
        self._partial_bytes = partial_bytes
        """Workspace limit of attention; splits that do not fit are computed one after the other."""
        self._shared_bytes = shared_bytes
        """Shared memory limit of a program."""

    def divide_attention(
        self, batch: AttentionBatch, n_heads: int, n_kv_heads: int, head_dim: int, window: int | None
    ) -> AttentionBatch:
        """See Kernels.divide_attention."""
        return divide_attention(batch, n_heads, n_kv_heads, head_dim, window or 0, self._partial_bytes)

    def attention(
        self,
        q_THC: Tensor,
        layer_cache: Tensor,
        batch: AttentionBatch,
        window: int | None,
        soft_cap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See Kernels.attention."""
        return attention(q_THC, layer_cache, batch, window or 0, soft_cap or 0.0, sinks_H, self._shared_bytes)
