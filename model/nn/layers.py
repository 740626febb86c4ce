"""The smallest parts of a block: linear layers, norms, activations, rotary and sinusoidal positions.

Parameters are allocated uninitialized: a file or Decoder.initialise fills them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import Activation, ModelConfig, RopeScaling

# torch 2.13 on a CPU: a call on so many numbers is not shared out to threads, and a multiple of so many leaves no rest.
_UNSHARED = 2**14
_NO_REST = 64
_FEW_ROWS = 10


def in_rows(function: Callable[[Tensor], Tensor], x_TF: Tensor) -> Tensor:
    """function(x), so that the bits of a row do not depend on where in x it stands.

    torch computes the last numbers of each thread's share, those that fill no vector, by another formula: with F 50,
    or with 3 threads and F 512, rows of silu and gelu differed in a bit from batch to batch. So each call is too small
    to be shared out, its rows are whole vectors, and they are contiguous: for others there is yet another gelu.
    """
    if torch.is_grad_enabled() or not x_TF.is_cpu:  # training needs no bitwise reproducibility
        return function(x_TF)
    n_columns = x_TF.shape[-1]
    rest = -n_columns % _NO_REST
    whole_TF = F.pad(x_TF, (0, rest)) if rest else x_TF.contiguous()
    if whole_TF.numel() <= _UNSHARED:
        out_TF = function(whole_TF)
    else:
        out_TF = torch.cat([function(part_TF) for part_TF in whole_TF.split(max(_UNSHARED // whole_TF.shape[-1], 1))])
    return out_TF[:, :n_columns] if rest else out_TF


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": partial(in_rows, F.gelu),
    "gelu_tanh": partial(in_rows, partial(F.gelu, approximate="tanh")),
    "silu": partial(in_rows, F.silu),
}


class Part(nn.Module):
    """A module called without the detour over hooks of nn.Module, which costs as much as the work at one token."""

    def __init_subclass__(cls) -> None:
        cls.__call__ = cls.forward  # type: ignore[method-assign]


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b. With 10 rows of W or fewer, MKL's float32 sums depend on how a row of x is aligned to 16 bytes."""
    n_rows, n_columns = weight.shape
    if n_rows <= _FEW_ROWS and n_columns % 4:
        x, weight = (F.pad(tensor, (0, -n_columns % 4)) for tensor in (x, weight))
    return F.linear(x, weight, bias)


class Linear(Part):
    """x [.., columns] -> [.., rows]."""

    def __init__(self, rows: int, columns: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self.product = product if rows <= _FEW_ROWS else F.linear

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


class RMSNorm(Part):
    """x / root mean square, scaled."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(Part):
    """(x - mean) / standard deviation, scaled and perhaps shifted."""

    def __init__(self, size: int, eps: float, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def seal(module: nn.Module) -> None:
    """Makes looking up parameters as quick as any attribute; the module must not be moved or reloaded afterwards.

    Together with Part this is 12 % of a decoder's time at one token (small, bfloat16, one thread: 770 us, not 880).
    """
    for part in module.modules():
        part.__dict__.update(part._parameters | part._modules | part._buffers)


def make_norm(config: ModelConfig) -> nn.Module:
    """The norm of `config` over the width."""
    match config.norm:
        case "rmsnorm":
            return RMSNorm(config.width, config.norm_eps)
        case "layernorm":
            return LayerNorm(config.width, config.norm_eps, bias=config.norm_bias)
    return nn.Identity()


# Shape legend: P positions, T tokens, N heads, C head_dim, F half of the numbers that turn, D width.

_SLICE = 4096


def rope_table(config: ModelConfig) -> Tensor:
    """[context, turned_dim] float32: the cosines of each position's angles, then the sines."""
    exponents_F = torch.arange(0, config.turned_dim, 2, dtype=torch.float64) / config.turned_dim
    frequencies_F = config.rope_theta**-exponents_F
    if config.rope_scaling:
        frequencies_F = _scaled(frequencies_F, config.rope_scaling)
    return _table(
        config.context, frequencies_F, lambda angles_PF: torch.cat((angles_PF.cos(), angles_PF.sin()), dim=-1)
    )


def rotate(x_TNC: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    """Rotary positions in the half-split layout (element i turns with element i + F), computed in float32.

    Numbers of a head beyond the first 2 F stay as they are.
    """
    half, head_dim = cos_T1F.shape[-1], x_TNC.shape[-1]
    first_TNF, second_TNF, *rest = x_TNC.split((half, half) + (head_dim - 2 * half,) * (2 * half < head_dim), dim=-1)
    turned = (first_TNF * cos_T1F - second_TNF * sin_T1F, second_TNF * cos_T1F + first_TNF * sin_T1F)
    return torch.cat((*turned, *rest), dim=-1).to(x_TNC.dtype)


def sinusoid_table(config: ModelConfig) -> Tensor:
    """[context, width] float32: sines in the even columns, cosines in the odd ones (arXiv:1706.03762, 3.5)."""
    exponents_F = torch.arange(0, config.width, 2, dtype=torch.float64) / config.width

    def sinusoids(angles_PF: Tensor) -> Tensor:
        return torch.stack((angles_PF.sin(), angles_PF.cos()), dim=-1).flatten(1)[:, : config.width]

    return _table(config.context, 10_000.0**-exponents_F, sinusoids)


def _table(context: int, frequencies_F: Tensor, row: Callable[[Tensor], Tensor]) -> Tensor:
    """`row` of each position's angles, a slice at a time: all of them in float64 would take six times the result."""
    positions_P = torch.arange(context, dtype=torch.float64)
    return torch.cat([row(slice_P[:, None] * frequencies_F).float() for slice_P in positions_P.split(_SLICE)])


def _scaled(frequencies_F: Tensor, scaling: RopeScaling) -> Tensor:
    stretched_F = frequencies_F / scaling.factor
    if scaling.kind == "linear":
        return stretched_F
    # How many times a wavelength fits into the original context decides how much it is stretched.
    turns_F = scaling.original_context * frequencies_F / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_F = ((turns_F - low) / (high - low)).clamp(0.0, 1.0)
    return torch.lerp(stretched_F, frequencies_F, kept_F)
