"""From the product with the q, k, v matrix to queries and a written cache, in one pass, by Triton. Knows no attention.

One program prepares some heads of one token. Shape legend: T tokens, H query heads, K kv heads, C head_dim, N heads of
a program, X columns of a head up to a power of two, P positions.

    heads of qkv:  0 .. H-1 queries | H .. H+K-1 keys | H+K .. H+2K-1 values
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.gpu.kernels.interface import HeadsSpec
from app.engine.gpu.kernels.launch_config import HEADS, ROW_LAUNCH, padded_dim


@triton.jit
def _normed(x_NX, scale_N, weight_NX, has_norm_N):
    """x times its head's scale and weights, rounded; heads without a norm as they are."""
    wide_NX = x_NX.to(tl.float32)
    wide_NX = tl.where(has_norm_N[:, None], wide_NX * scale_N[:, None] * weight_NX, wide_NX)
    return wide_NX.to(x_NX.dtype).to(tl.float32)


@triton.jit
def _weights(q_norm_ptr, k_norm_ptr, column_X, there_X, is_q_N, HAS_Q: tl.constexpr, HAS_K: tl.constexpr):
    """[N, X]: of the norm of queries for those, of the norm of keys for all others."""
    q_X = tl.load(q_norm_ptr + column_X, mask=there_X & HAS_Q, other=0.0).to(tl.float32)
    k_X = tl.load(k_norm_ptr + column_X, mask=there_X & HAS_K, other=0.0).to(tl.float32)
    return tl.where(is_q_N[:, None], q_X[None, :], k_X[None, :])


@triton.jit
def _angles(rope_ptr, position, column_X, HALF: tl.constexpr):
    """Cosine of each column, and its sine with the sign that the other number of the pair comes with."""
    angle_ptr = rope_ptr + position.to(tl.int64) * (2 * HALF) + column_X % HALF
    cos_X = tl.load(angle_ptr, mask=column_X < 2 * HALF, other=1.0)
    sin_X = tl.load(angle_ptr + HALF, mask=column_X < 2 * HALF, other=0.0)
    return cos_X, tl.where(column_X < HALF, -sin_X, sin_X)


@triton.jit
def _keep(
    cache_ptr, value_offset, slot, head_N, column_X, x_NX, kept_NX, N_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Keys, and behind them values, into the cache; a slot below 0 is none."""
    is_k_N = head_N < N_KV_HEADS
    kv_head_N = tl.where(is_k_N, head_N, head_N - N_KV_HEADS)
    place_N = (slot * N_KV_HEADS + kv_head_N) * HEAD_DIM + tl.where(is_k_N, 0, value_offset)
    kept_NX = kept_NX & (slot >= 0)
    tl.store(cache_ptr + place_N[:, None] + column_X[None, :], x_NX.to(cache_ptr.dtype.element_ty), mask=kept_NX)


@triton.jit
def heads_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    position_ptr,
    rope_ptr,
    slot_ptr,
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
    HEADS: tl.constexpr,
):
    """HALF: half of the numbers that turn, 0 for none. value_offset: numbers from the keys to the values of a layer."""
    token = tl.program_id(0).to(tl.int64)
    head_N = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column_X = tl.arange(0, PADDED)
    is_q_N, is_k_N = head_N < N_HEADS, (head_N >= N_HEADS) & (head_N < N_HEADS + N_KV_HEADS)
    there_X = column_X < HEAD_DIM
    there_NX = (head_N < N_HEADS + 2 * N_KV_HEADS)[:, None] & there_X[None, :]
    from_ptr = qkv_ptr + (token * (N_HEADS + 2 * N_KV_HEADS) + head_N[:, None]) * HEAD_DIM
    raw_NX = tl.load(from_ptr + column_X[None, :], mask=there_NX, other=0.0)
    x_NX = raw_NX.to(tl.float32)
    scale_N = tl.rsqrt(tl.sum(x_NX * x_NX, axis=1) / HEAD_DIM + eps)
    has_norm_N = (is_q_N & HAS_Q_NORM) | (is_k_N & HAS_K_NORM)
    weight_NX = _weights(q_norm_ptr, k_norm_ptr, column_X, there_X, is_q_N, HAS_Q_NORM, HAS_K_NORM)
    x_NX = _normed(raw_NX, scale_N, weight_NX, has_norm_N)
    if HALF:
        # Number i turns with number i + HALF: the other one of each pair is read and normed a second time.
        other_X = tl.where(column_X < HALF, column_X + HALF, tl.where(column_X < 2 * HALF, column_X - HALF, column_X))
        other_NX = tl.load(from_ptr + other_X[None, :], mask=there_NX, other=0.0)
        weight_NX = _weights(q_norm_ptr, k_norm_ptr, other_X, there_X, is_q_N, HAS_Q_NORM, HAS_K_NORM)
        other_NX = _normed(other_NX, scale_N, weight_NX, has_norm_N)
        cos_X, sin_X = _angles(rope_ptr, tl.load(position_ptr + token), column_X, HALF)
        turned_NX = (x_NX * cos_X[None, :] + other_NX * sin_X[None, :]).to(raw_NX.dtype).to(tl.float32)
        x_NX = tl.where((is_q_N | is_k_N)[:, None] & (column_X < 2 * HALF)[None, :], turned_NX, x_NX)
    q_place_N = (token * N_HEADS + head_N) * HEAD_DIM
    q_NX = (x_NX * q_factor).to(raw_NX.dtype)
    tl.store(q_ptr + q_place_N[:, None] + column_X[None, :], q_NX, mask=there_NX & is_q_N[:, None])
    kept_NX = there_NX & (head_N >= N_HEADS)[:, None]
    slot = tl.load(slot_ptr + token).to(tl.int64)
    _keep(cache_ptr, value_offset, slot, head_N - N_HEADS, column_X, x_NX, kept_NX, N_KV_HEADS, HEAD_DIM)


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
    heads_kernel[(n_tokens, triton.cdiv(n_heads, HEADS))](
        qkv_TX,
        qkv_TX if spec.q_norm is None else spec.q_norm,
        qkv_TX if spec.k_norm is None else spec.k_norm,
        positions_T,
        qkv_TX if rope_PC is None else rope_PC,
        slots_T,
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
        HEADS=HEADS,
        **ROW_LAUNCH.options,
    )
    return q_THC
