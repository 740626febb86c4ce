"""The activation between the matrices of a feed-forward, gated or not, by Triton. Knows no network.

Shape legend: T tokens, F mlp width, X columns of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.gpu.kernels.launch_config import COLUMNS, ROW_LAUNCH
from model.config import Activation


@triton.jit
def _activated(x_X, KIND: tl.constexpr):
    """In float32; 0.5 (1 + tanh u) is sigmoid(2 u)."""
    if KIND == "relu":
        return tl.where(x_X < 0, 0.0, x_X)  # a number that is none stays none, as in torch
    if KIND == "gelu":
        return 0.5 * x_X * (1.0 + tl.erf(x_X * 0.7071067811865476))
    if KIND == "gelu_tanh":
        return x_X / (1.0 + tl.exp(-1.5957691216057308 * (x_X + 0.044715 * x_X * x_X * x_X)))
    return x_X / (1.0 + tl.exp(-x_X))


@triton.jit
def gate_kernel(
    hidden_ptr, out_ptr, WIDTH: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, COLUMNS: tl.constexpr
):
    """Some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column_X = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there_X = column_X < WIDTH
    first_ptr = hidden_ptr + row * (2 * WIDTH if GATED else WIDTH)
    gate_X = tl.load(first_ptr + column_X, mask=there_X, other=0.0)
    out_X = _activated(gate_X.to(tl.float32), KIND).to(gate_X.dtype)
    if GATED:
        up_X = tl.load(first_ptr + WIDTH + column_X, mask=there_X, other=0.0)
        out_X = (out_X.to(tl.float32) * up_X.to(tl.float32)).to(gate_X.dtype)
    tl.store(out_ptr + row * WIDTH + column_X, out_X, mask=there_X)


def gate(hidden_TX: Tensor, activation: Activation, gated: bool) -> Tensor:
    """See Kernels.gate."""
    assert hidden_TX.is_contiguous()
    n_tokens, width = hidden_TX.shape[0], hidden_TX.shape[1] // (2 if gated else 1)
    out_TF = torch.empty(n_tokens, width, dtype=hidden_TX.dtype, device=hidden_TX.device)
    grid = (n_tokens, triton.cdiv(width, COLUMNS))
    gate_kernel[grid](
        hidden_TX, out_TF, WIDTH=width, KIND=activation, GATED=gated, COLUMNS=COLUMNS, **ROW_LAUNCH.options
    )
    return out_TF
