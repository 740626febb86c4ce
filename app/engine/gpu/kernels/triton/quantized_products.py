"""Triton kernels for 8-bit weights: products with int8 weights, and quantization of rows to e4m3 (fp8)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.gpu.kernels.reference_operations import FP8_DTYPE, FP8_MAX, Fp8Matrix
from app.engine.quantization.int8_weights import Quantized

# t: tokens, 16 or 64 of a tile
#            +---------------+
#          k |      x^T      |      in steps of 128 from column 0 on
#     k      +---------------+
#   +----+   +---------------+
# n |  W | x |  sums, float32|  x scale of row n, + bias of row n, rounded as x is
#   +----+   +---------------+
#
# With few tokens, reading W dominates the time, half of that in bfloat16. W is the left operand, so that 64 of its rows
# fill the tensor cores however few tokens there are. Both tile sizes sum in the same order with the same kind of
# instruction, so the number of tokens should not change the bits of a token (to be verified on each GPU model).
#
# The reference is in reference_operations.py. Shape legend: T tokens of the step, K columns, N rows of the weight.

BLOCK_N = 64
BLOCK_K = 128
WARPS = 4
_TILES = ((16, 16, 4), (1 << 62, 64, 3))
"""(most tokens of a step, tokens of a tile, pipeline stages)."""


def int8_product(x_TK: Tensor, weight: Quantized, bias_N: Tensor | None) -> Tensor:
    """An Int8Product; x may be a view with a larger row stride."""
    n_tokens, n_columns = x_TK.shape
    n_rows = len(weight.numbers)
    out_TN = torch.empty(n_tokens, n_rows, dtype=x_TK.dtype, device=x_TK.device)
    block_t, stages = tile(n_tokens)
    grid = (triton.cdiv(n_rows, BLOCK_N), triton.cdiv(n_tokens, block_t))
    bias = weight.scales if bias_N is None else bias_N  # placeholder; the kernel does not read it
    int8_product_kernel[grid](
        *(x_TK, weight.numbers, weight.scales, bias, out_TN),
        *(n_tokens, n_rows, x_TK.stride(0)),
        N_COLUMNS=n_columns,
        HAS_BIAS=bias_N is not None,
        BLOCK_T=block_t,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=WARPS,
        num_stages=stages,
        enable_fp_fusion=False,  # the compiler would decide for each variant where to fuse
    )
    return out_TN


def tile(n_tokens: int) -> tuple[int, int]:
    """Tokens of a tile, and pipeline stages, for a step of `n_tokens` tokens."""
    return next((block, stages) for most, block, stages in _TILES if n_tokens <= most)


@triton.jit(do_not_specialize=["n_tokens"])
def int8_product_kernel(
    x_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    n_tokens: tl.tensor,
    n_rows: tl.tensor,
    x_stride: tl.tensor,
    N_COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One tile [BLOCK_N, BLOCK_T] of the product, transposed when it is stored."""
    rows_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens_T = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_row_N, is_token_T = rows_N < n_rows, tokens_T < n_tokens
    numbers_N1 = numbers_ptr + rows_N.to(tl.int64)[:, None] * N_COLUMNS
    x_1T = x_ptr + tokens_T.to(tl.int64)[None, :] * x_stride
    sums_NT = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for start in range(0, N_COLUMNS, BLOCK_K):
        columns_K = start + tl.arange(0, BLOCK_K)
        is_column_K = columns_K < N_COLUMNS
        w_NK = tl.load(numbers_N1 + columns_K[None, :], mask=is_row_N[:, None] & is_column_K[None, :], other=0)
        x_KT = tl.load(x_1T + columns_K[:, None], mask=is_column_K[:, None] & is_token_T[None, :], other=0.0)
        sums_NT = tl.dot(w_NK.to(x_KT.dtype), x_KT, sums_NT, input_precision="ieee")
    out_NT = sums_NT * tl.load(scales_ptr + rows_N, mask=is_row_N, other=0.0)[:, None]
    if HAS_BIAS:
        out_NT += tl.load(bias_ptr + rows_N, mask=is_row_N, other=0.0).to(tl.float32)[:, None]
    out_pointers = out_ptr + tokens_T.to(tl.int64)[None, :] * n_rows + rows_N[:, None]
    tl.store(out_pointers, out_NT.to(out_ptr.dtype.element_ty), mask=is_row_N[:, None] & is_token_T[None, :])


# One program quantizes a whole row, so that its bits depend on nothing else; they equal those of quantize_fp8_rows() in
# reference_operations.py. Shape legend: T tokens of the step, K columns, W the next power of two.

_COLUMNS_PER_WARP = 1024
_MAX_WARPS = 16
_SCALES_MULTIPLE = 256


def quantize_fp8_rows(x_TK: Tensor) -> Fp8Matrix:
    """An Fp8RowQuantizer; x may be a view with a larger row stride."""
    n_tokens, n_columns = x_TK.shape
    numbers_TK = torch.empty(n_tokens, n_columns, dtype=FP8_DTYPE, device=x_TK.device)
    # torch's product reads scales beyond the last row, up to a multiple of 256 (pytorch issue 133334).
    padded_rows = triton.cdiv(n_tokens, _SCALES_MULTIPLE) * _SCALES_MULTIPLE
    scales_T1 = torch.empty(padded_rows, 1, dtype=torch.float32, device=x_TK.device)[:n_tokens]
    padded = triton.next_power_of_2(n_columns)
    quantize_row_kernel[(n_tokens,)](
        *(x_TK, numbers_TK, scales_T1, x_TK.stride(0)),
        N_COLUMNS=n_columns,
        PADDED=padded,
        FP8_MAX=FP8_MAX,
        num_warps=warps(n_columns),
    )
    return Fp8Matrix(numbers_TK, scales_T1)


def warps(n_columns: int) -> int:
    """Warps of a program for rows of `n_columns` numbers."""
    padded: int = triton.next_power_of_2(n_columns)
    return min(max(1, padded // _COLUMNS_PER_WARP), _MAX_WARPS)


@triton.jit
def quantize_row_kernel(
    x_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    x_stride: tl.tensor,
    N_COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    FP8_MAX: tl.constexpr,
) -> None:
    """Quantizes one row."""
    row = tl.program_id(0).to(tl.int64)
    columns_W = tl.arange(0, PADDED)
    is_column_W = columns_W < N_COLUMNS
    x_W = tl.load(x_ptr + row * x_stride + columns_W, mask=is_column_W, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x_W), axis=0), FP8_MAX)
    scale = tl.where(scale == 0.0, 1.0, scale)
    numbers_W = tl.div_rn(x_W, scale).to(numbers_ptr.dtype.element_ty)
    tl.store(numbers_ptr + row * N_COLUMNS + columns_W, numbers_W, mask=is_column_W)
    tl.store(scales_ptr + row, scale)
