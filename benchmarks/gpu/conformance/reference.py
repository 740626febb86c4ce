"""Slow reference implementations of the operations of a step: one token at a time, in float64.

Results are rounded to the number format where app/engine/gpu/kernels/interface.py says so, and stay float64 otherwise.
Shape legend: D width, H query heads, K kv heads, G = H / K, C head_dim, L positions, F half of the rotary dimensions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from app.engine.gpu.kernels.interface import AttentionSpec, HeadsSpec, NormSpec
from model.config import Activation


def attended(q_HC: Tensor, k_LKC: Tensor, v_LKC: Tensor, position: int, spec: AttentionSpec) -> Tensor:
    """Attention output [H, C] of the token at `position`, given the keys and values of its sequence."""
    first = 0 if spec.window is None else max(0, position - spec.window + 1)
    group = q_HC.shape[0] // k_LKC.shape[1]
    k_LHC, v_LHC = (x[first : position + 1].double().repeat_interleave(group, dim=1) for x in (k_LKC, v_LKC))
    scores_HL = (q_HC.double() * k_LHC).sum(-1).T / math.sqrt(q_HC.shape[1])
    if spec.soft_cap is not None:
        scores_HL = spec.soft_cap * torch.tanh(scores_HL / spec.soft_cap)
    odds_HL = torch.exp(scores_HL - scores_HL.amax(-1, keepdim=True))
    return (odds_HL.T[:, :, None] * v_LHC).sum(0) / odds_HL.sum(-1)[:, None]


def normed(x_D: Tensor, norm: NormSpec) -> Tensor:
    """Normalizes one row."""
    wide_D = x_D.double()
    if norm.kind == "none":
        return wide_D
    if norm.kind == "layernorm":
        wide_D = wide_D - wide_D.mean()
    wide_D = wide_D / torch.sqrt(wide_D.square().mean() + norm.eps)
    if norm.weight is not None:
        wide_D = wide_D * norm.weight.double()
    return wide_D if norm.bias is None else wide_D + norm.bias.double()


def prepared(
    x_C: Tensor, weight_C: Tensor | None, spec: HeadsSpec, angles_F: tuple[Tensor, Tensor] | None, factor: float
) -> Tensor:
    """One head of one token: normalized, rotated, and scaled; each result rounded."""
    dtype = x_C.dtype
    if weight_C is not None:
        x_C = normed(x_C, NormSpec(kind="rmsnorm", weight=weight_C, eps=spec.eps)).to(dtype)
    if angles_F is not None:
        cos_F, sin_F = (angle_F.double() for angle_F in angles_F)
        half = len(cos_F)
        a_F, b_F = x_C[:half].double(), x_C[half : 2 * half].double()
        x_C = torch.cat((a_F * cos_F - b_F * sin_F, b_F * cos_F + a_F * sin_F, x_C[2 * half :].double())).to(dtype)
    return x_C.double() * factor


def activated(x: Tensor, activation: Activation) -> Tensor:
    """Elementwise activation."""
    wide = x.double()
    match activation:
        case "relu":
            return wide.clamp(min=0)
        case "gelu":
            return 0.5 * wide * (1 + torch.erf(wide / math.sqrt(2)))
        case "gelu_tanh":
            return 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        case "silu":
            return wide / (1 + torch.exp(-wide))
