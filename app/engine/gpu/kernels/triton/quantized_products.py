"""Products with weights of eight bits in Triton: whole numbers (int8), and rounding of rows to e4m3 (fp8)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.gpu.kernels.reference_operations import FP8_DTYPE, LARGEST, Rounded
from app.engine.quantization.int8_weights import Quantized

# t: tokens, 16 or 64 of a tile
#            +---------------+
#          k |      x^T      |      in steps of 128 from column 0 on
#     k      +---------------+
#   +----+   +---------------+
# n |  W | x |  sums, float32|  x scale of row n, + bias of row n, rounded as x is
#   +----+   +---------------+
#
# With few tokens reading W is what takes time: half of what it is in bfloat16. W is the left operand, so that 64 of its
# rows fill the tensor cores however few tokens there are, and both tiles sum in the same order with the same kind of
# instruction: how many tokens there are should not change the bits of one (said of no GPU until it was tried on one).
#
# The reference is in reference_operations.py. Shape legend: T tokens of the step, K columns, N rows of the weight.

BLOCK_N = 64
BLOCK_K = 128
WARPS = 4
_TILES = ((16, 16, 4), (1 << 62, 64, 3))
"""(most tokens of a step, tokens of a tile, tiles on their way from memory at once)."""


def product(x_TK: Tensor, weight: Quantized, bias_N: Tensor | None) -> Tensor:
    """An Int8Product; x may be a view whose rows are apart."""
    n_tokens, n_columns = x_TK.shape
    n_rows = len(weight.numbers)
    out_TN = torch.empty(n_tokens, n_rows, dtype=x_TK.dtype, device=x_TK.device)
    block_t, stages = tile(n_tokens)
    grid = (triton.cdiv(n_rows, BLOCK_N), triton.cdiv(n_tokens, block_t))
    bias = weight.scales if bias_N is None else bias_N  # a pointer that is not read
    multiply[grid](
        *(x_TK, weight.numbers, weight.scales, bias, out_TN),
        *(n_tokens, n_rows, x_TK.stride(0)),
        N_COLUMNS=n_columns,
        HAS_BIAS=bias_N is not None,
        BLOCK_T=block_t,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=WARPS,
        num_stages=stages,
        enable_fp_fusion=False,  # where a product and a sum become one is up to the compiler of each variant
    )
    return out_TN


def tile(n_tokens: int) -> tuple[int, int]:
    """Tokens of a tile, and how many tiles are on their way from memory at once."""
    return next((block, stages) for most, block, stages in _TILES if n_tokens <= most)


@triton.jit(do_not_specialize=["n_tokens"])
def multiply(
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
    """One tile [BLOCK_N, BLOCK_T] of the product, turned as it is written."""
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


# One program does a whole row, so that its bits depend on nothing else, and they are those of round_rows() in
# reference_operations.py. Shape legend: T tokens of the step, K columns, W the next power of two.

_COLUMNS_OF_A_WARP = 1024
_MOST_WARPS = 16
_SCALES_READ = 256


def round_rows(x_TK: Tensor) -> Rounded:
    """An Fp8Rows; x may be a view whose rows are apart."""
    n_tokens, n_columns = x_TK.shape
    numbers_TK = torch.empty(n_tokens, n_columns, dtype=FP8_DTYPE, device=x_TK.device)
    # torch's product read scales behind the last row, up to a multiple of 256 (pytorch issue 133334): room for that.
    room = triton.cdiv(n_tokens, _SCALES_READ) * _SCALES_READ
    scales_T1 = torch.empty(room, 1, dtype=torch.float32, device=x_TK.device)[:n_tokens]
    padded = triton.next_power_of_2(n_columns)
    round_row[(n_tokens,)](
        *(x_TK, numbers_TK, scales_T1, x_TK.stride(0)),
        N_COLUMNS=n_columns,
        PADDED=padded,
        LARGEST=LARGEST,
        num_warps=warps(n_columns),
    )
    return Rounded(numbers_TK, scales_T1)


def warps(n_columns: int) -> int:
    """Of a program, for rows of so many numbers."""
    padded: int = triton.next_power_of_2(n_columns)
    return min(max(1, padded // _COLUMNS_OF_A_WARP), _MOST_WARPS)


@triton.jit
def round_row(
    x_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    x_stride: tl.tensor,
    N_COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    columns_W = tl.arange(0, PADDED)
    is_column_W = columns_W < N_COLUMNS
    x_W = tl.load(x_ptr + row * x_stride + columns_W, mask=is_column_W, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x_W), axis=0), LARGEST)
    scale = tl.where(scale == 0.0, 1.0, scale)
    numbers_W = tl.div_rn(x_W, scale).to(numbers_ptr.dtype.element_ty)
    tl.store(numbers_ptr + row * N_COLUMNS + columns_W, numbers_W, mask=is_column_W)
    tl.store(scales_ptr + row, scale)
