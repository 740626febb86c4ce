"""The smallest parts of a block: a matrix with or without bias, a norm, an activation. Knows no attention.

Parameters are made empty: what stands in them comes from a file or from Decoder.initialise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import Activation, ModelConfig

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
    if torch.is_grad_enabled() or not x_TF.is_cpu:  # in training nobody compares bits
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
