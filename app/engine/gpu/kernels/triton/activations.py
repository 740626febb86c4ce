"""Activations in Triton, of a whole row or of what a product computes.

Shape legend: T tokens, F mlp width, X columns of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.gpu.kernels.interface import COLUMNS, ROW_LAUNCH
from model.config import Activation

LIMIT, ALPHA = tl.constexpr(7.0), tl.constexpr(1.702)
"""Of the clamped SwiGLU."""


@triton.jit
def activate(x_X, parameters_ptr, KIND: tl.constexpr):
    """Activation in float32; 0.5 (1 + tanh u) is sigmoid(2 u)."""
    if KIND == "relu":
        return tl.where(x_X < 0, 0.0, x_X)  # NaN stays NaN, as in torch
    if KIND == "gelu":
        return 0.5 * x_X * (1.0 + tl.erf(x_X * 0.7071067811865476))
    if KIND == "gelu_tanh":
        return x_X / (1.0 + tl.exp(-1.5957691216057308 * (x_X + 0.044715 * x_X * x_X * x_X)))
    if KIND == "relu2":
        return tl.where(x_X < 0, 0.0, x_X * x_X)
    if KIND == "xielu":
        left_X = (tl.exp(tl.where(x_X < 0, x_X, 0.0)) - 1.0 - x_X) * tl.load(parameters_ptr + 1)
        return tl.where(x_X > 0, tl.load(parameters_ptr) * x_X * x_X, left_X) + 0.5 * x_X
    return x_X / (1.0 + tl.exp(-x_X))


@triton.jit
def activate_gated(gate_X, up_X, parameters_ptr, KIND: tl.constexpr):
    """activation(gate), rounded, times up; the clamped SwiGLU is rounded once. NaN stays NaN, as in torch."""
    wide_gate_X, wide_up_X = gate_X.to(tl.float32), up_X.to(tl.float32)
    if KIND == "swiglu_clamped":
        wide_gate_X = tl.where(wide_gate_X > LIMIT, LIMIT, wide_gate_X)
        wide_up_X = tl.where(wide_up_X > LIMIT, LIMIT, tl.where(wide_up_X < -LIMIT, -LIMIT, wide_up_X))
        return ((wide_up_X + 1.0) * (wide_gate_X / (1.0 + tl.exp(wide_gate_X * -ALPHA)))).to(gate_X.dtype)
    out_X = activate(wide_gate_X, parameters_ptr, KIND).to(gate_X.dtype)
    return (out_X.to(tl.float32) * wide_up_X).to(gate_X.dtype)


@triton.jit
def gate_kernel(
    hidden_ptr, parameters_ptr, out_ptr,
    WIDTH: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Activates some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column_X = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid_X = column_X < WIDTH
    first_ptr = hidden_ptr + row * (2 * WIDTH if GATED else WIDTH)
    gate_X = tl.load(first_ptr + column_X, mask=valid_X, other=0.0)
    if GATED:
        up_X = tl.load(first_ptr + WIDTH + column_X, mask=valid_X, other=0.0)
        out_X = activate_gated(gate_X, up_X, parameters_ptr, KIND)
    else:
        out_X = activate(gate_X.to(tl.float32), parameters_ptr, KIND).to(gate_X.dtype)
    tl.store(out_ptr + row * WIDTH + column_X, out_X, mask=valid_X)


def gate(hidden_TX: Tensor, activation: Activation, gated: bool, parameters: Tensor | None = None) -> Tensor:
    """See Kernels.gate."""
    assert hidden_TX.is_contiguous()
    n_tokens, width = hidden_TX.shape[0], hidden_TX.shape[1] // (2 if gated else 1)
    out_TF = torch.empty(n_tokens, width, dtype=hidden_TX.dtype, device=hidden_TX.device)
    grid = (n_tokens, triton.cdiv(width, COLUMNS))
    gate_kernel[grid](
        hidden_TX, hidden_TX if parameters is None else parameters, out_TF,
        WIDTH=width, KIND=activation, GATED=gated, COLUMNS=COLUMNS, **ROW_LAUNCH,
    )  # fmt: skip
    return out_TF
