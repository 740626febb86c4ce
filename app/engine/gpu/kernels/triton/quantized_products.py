"""Triton kernels for quantized weights: products with packed matrices, and quantization of rows to e4m3 (fp8)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.gpu.kernels.interface import COLUMNS, ROW_LAUNCH
from app.engine.gpu.kernels.triton.packed_weights import packed_constants, packed_pointers, packed_tile
from app.engine.quantization.quantized_weights import FP8_DTYPE, FP8_MAX, Fp8Matrix
from model.nn.packed_tensors import PackedTensors

# t: tokens, 16 or 64 of a tile
#            +---------------+
#          k |      x^T      |      in steps of 128 from the first column of a split
#     k      +---------------+
#   +----+   +---------------+
# n |  W | x |  sums, float32|  x scale of row n, + bias of row n, rounded as x is
#   +----+   +---------------+
#
# With few tokens, reading W dominates the time, half of that in bfloat16. W is the left operand, so that 64 of its rows
# fill the tensor cores however few tokens there are. A matrix of few rows is divided into splits of its columns, which
# depend on its sizes alone, so that there is work for all multiprocessors; their sums are added in order. Both tile
# sizes sum in the same order with the same kind of instruction, so the number of tokens should not change the bits of a
# token (to be verified on each GPU model).
#
# With more tokens the multiplications dominate, and a library is faster: on an H100 the kernel took 2.3 times as long
# as cuBLAS in bfloat16 for a prompt of 1,000 tokens (int8 with a scale for each row). W is then dequantized in pieces
# that fit into the L2 cache.
#
# The reference is in quantized_weights.py. Shape legend: T tokens of the step, K columns, N rows of the weight, Y
# splits.

BLOCK_N = 64
BLOCK_K = 128
WARPS = 4
MAX_KERNEL_TOKENS = 64
"""A step of more tokens goes through a library."""
_PROGRAMS = 264
"""Two for each multiprocessor of a Hopper GPU."""
_LEAST_SPLIT = 512
"""Columns, so that adding the splits costs little."""
_PIECE_BYTES = 32 << 20
_DEQUANTIZED = {"ROWS": 8, "BLOCK_K": 256}
"""Numbers of a program, which share a unit."""


def packed_product(x_TK: Tensor, weight: PackedTensors, bias_N: Tensor | None) -> Tensor:
    """A PackedProduct; x may be a view with a larger row stride."""
    (n_tokens, n_columns), n_rows = x_TK.shape, len(weight.codes)
    if n_tokens > MAX_KERNEL_TOKENS:
        return product_by_pieces(x_TK, weight, bias_N)
    out_TN = torch.empty(n_tokens, n_rows, dtype=x_TK.dtype, device=x_TK.device)
    block_t, stages = tile(n_tokens)
    columns = split_columns(n_rows, n_columns)
    splits = triton.cdiv(n_columns, columns)
    sums_YTN = out_TN if splits == 1 else torch.empty(splits, *out_TN.shape, dtype=torch.float32, device=x_TK.device)
    bias = x_TK if bias_N is None else bias_N  # placeholder; the kernel does not read it
    packed_product_kernel[(triton.cdiv(n_rows, BLOCK_N), triton.cdiv(n_tokens, block_t), splits)](
        *(x_TK, *packed_pointers(weight), bias, sums_YTN),
        *(n_tokens, n_rows, x_TK.stride(0)),
        N_COLUMNS=n_columns,
        SPLIT_COLUMNS=columns,
        HAS_BIAS=bias_N is not None,
        BLOCK_T=block_t,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        **packed_constants(weight.format),
        num_warps=WARPS,
        num_stages=stages,
        enable_fp_fusion=False,  # the compiler would decide for each variant where to fuse
    )
    if splits > 1:
        add_splits_kernel[(n_tokens, triton.cdiv(n_rows, COLUMNS))](
            *(sums_YTN, bias, out_TN, n_tokens, n_rows),
            SPLITS=splits,
            HAS_BIAS=bias_N is not None,
            COLUMNS=COLUMNS,
            **ROW_LAUNCH,
        )
    return out_TN


def tile(n_tokens: int) -> tuple[int, int]:
    """Tokens of a tile, and pipeline stages, for a step of `n_tokens` tokens."""
    return (16, 4) if n_tokens <= 16 else (64, 3)


def split_columns(n_rows: int, n_columns: int) -> int:
    """Columns of a split, a multiple of BLOCK_K."""
    wanted = triton.cdiv(_PROGRAMS, triton.cdiv(n_rows, BLOCK_N))
    columns: int = triton.cdiv(max(triton.cdiv(n_columns, wanted), _LEAST_SPLIT), BLOCK_K) * BLOCK_K
    return columns


def product_by_pieces(x_TK: Tensor, weight: PackedTensors, bias_N: Tensor | None) -> Tensor:
    """The product by torch, with the weight dequantized to x's format in pieces, never as a whole."""
    (n_tokens, n_columns), n_rows = x_TK.shape, len(weight.codes)
    out_TN = torch.empty(n_tokens, n_rows, dtype=x_TK.dtype, device=x_TK.device)
    rows = max(1, _PIECE_BYTES // (n_columns * x_TK.element_size()))
    piece_NK = x_TK.new_empty(min(rows, n_rows), n_columns)
    for start in range(0, n_rows, rows):
        here = slice(start, start + rows)
        matrix_NK = piece_NK[: n_rows - start]
        grid = (triton.cdiv(len(matrix_NK), _DEQUANTIZED["ROWS"]), triton.cdiv(n_columns, _DEQUANTIZED["BLOCK_K"]))
        dequantize_kernel[grid](
            *(*packed_pointers(weight), matrix_NK, start, len(matrix_NK)),
            N_COLUMNS=n_columns,
            **_DEQUANTIZED,
            **packed_constants(weight.format),
            **ROW_LAUNCH,
        )
        if bias_N is None:
            torch.mm(x_TK, matrix_NK.t(), out=out_TN[:, here])
        else:
            torch.addmm(bias_N[here], x_TK, matrix_NK.t(), out=out_TN[:, here])
    return out_TN


@triton.jit(do_not_specialize=["first_row", "n_rows"])
def dequantize_kernel(
    codes_ptr, scales_ptr, scale_units_ptr, offsets_ptr, offset_units_ptr, out_ptr, first_row, n_rows,
    N_COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    HAS_UNITS: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    STEP: tl.constexpr, FIRST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Some numbers of some rows, from first_row on, rounded to the format of `out`."""
    row_N = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    start = tl.program_id(1) * BLOCK_K
    column_K = start + tl.arange(0, BLOCK_K)
    is_row_N = row_N < n_rows
    numbers_NK = packed_tile(
        codes_ptr, scales_ptr, scale_units_ptr, offsets_ptr, offset_units_ptr, first_row + row_N, is_row_N, start,
        N_COLUMNS, BLOCK_K, BITS, GROUP, HAS_UNITS, HAS_OFFSETS, STEP, FIRST, LOW, HIGH,
    )  # fmt: skip
    mask_NK = is_row_N[:, None] & (column_K < N_COLUMNS)[None, :]
    out_NK = out_ptr + row_N[:, None] * N_COLUMNS + column_K[None, :]
    tl.store(out_NK, numbers_NK.to(out_ptr.dtype.element_ty), mask=mask_NK)


@triton.jit(do_not_specialize=["n_tokens"])
def packed_product_kernel(
    x_ptr, codes_ptr, scales_ptr, scale_units_ptr, offsets_ptr, offset_units_ptr, bias_ptr, out_ptr,
    n_tokens, n_rows, x_stride,
    N_COLUMNS: tl.constexpr, SPLIT_COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    HAS_UNITS: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    STEP: tl.constexpr, FIRST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_N, BLOCK_T] of the product, transposed when it is stored; of several splits, the sums of one."""
    rows_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens_T = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = tl.program_id(2) * SPLIT_COLUMNS
    is_row_N, is_token_T = rows_N < n_rows, tokens_T < n_tokens
    x_1T = x_ptr + tokens_T.to(tl.int64)[None, :] * x_stride
    out_NT = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for start in range(first, tl.minimum(first + SPLIT_COLUMNS, N_COLUMNS), BLOCK_K):
        columns_K = start + tl.arange(0, BLOCK_K)
        w_NK = packed_tile(
            codes_ptr, scales_ptr, scale_units_ptr, offsets_ptr, offset_units_ptr, rows_N.to(tl.int64), is_row_N,
            start, N_COLUMNS, BLOCK_K, BITS, GROUP, HAS_UNITS, HAS_OFFSETS, STEP, FIRST, LOW, HIGH,
        )  # fmt: skip
        x_mask_KT = (columns_K < N_COLUMNS)[:, None] & is_token_T[None, :]
        x_KT = tl.load(x_1T + columns_K[:, None], mask=x_mask_KT, other=0.0)
        out_NT = tl.dot(w_NK.to(x_KT.dtype), x_KT, out_NT, input_precision="ieee")
    if SPLIT_COLUMNS >= N_COLUMNS and HAS_BIAS:
        out_NT += tl.load(bias_ptr + rows_N, mask=is_row_N, other=0.0).to(tl.float32)[:, None]
    offset_1T = (tl.program_id(2) * n_tokens + tokens_T).to(tl.int64)[None, :] * n_rows
    out_mask_NT = is_row_N[:, None] & is_token_T[None, :]
    tl.store(out_ptr + offset_1T + rows_N[:, None], out_NT.to(out_ptr.dtype.element_ty), mask=out_mask_NT)


@triton.jit(do_not_specialize=["n_tokens"])
def add_splits_kernel(
    sums_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    n_tokens: tl.tensor,
    n_rows: tl.tensor,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Some numbers of one token: adds the splits in order, adds the bias, rounds."""
    row_X = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid_X, token = row_X < n_rows, tl.program_id(0).to(tl.int64)
    out_X = tl.load(sums_ptr + token * n_rows + row_X, mask=valid_X, other=0.0)
    for split in tl.static_range(1, SPLITS):
        out_X += tl.load(sums_ptr + (split * n_tokens + token) * n_rows + row_X, mask=valid_X, other=0.0)
    if HAS_BIAS:
        out_X += tl.load(bias_ptr + row_X, mask=valid_X, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * n_rows + row_X, out_X.to(out_ptr.dtype.element_ty), mask=valid_X)


# One program quantizes a whole row, so that its bits depend on nothing else; they equal quantize_fp8_rows() in
# quantized_weights.py. Shape legend: T tokens of the step, K columns, W the next power of two.

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
