"""Rows rounded to e4m3 with a scale for each, in Triton: one reading of a row, where torch takes eight operations.

One program does a whole row, so that its bits depend on nothing else, and they are those of the twin, round_rows() in
app/engine/gpu/kernels/fp8.py. Shape legend: T tokens of the step, K columns, W the next power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.gpu.kernels.fp8 import DTYPE, LARGEST, Rounded

_COLUMNS_OF_A_WARP = 1024
_MOST_WARPS = 16
_SCALES_READ = 256


def round_rows(x_TK: Tensor) -> Rounded:
    """An Fp8Rows; x may be a view whose rows are apart."""
    n_tokens, n_columns = x_TK.shape
    numbers_TK = torch.empty(n_tokens, n_columns, dtype=DTYPE, device=x_TK.device)
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
