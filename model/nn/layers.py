"""Building blocks of a layer: linear layers, norms, activations, rotation by rotary positions.

Parameters are allocated uninitialized; a file or Decoder.initialize fills them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from model.config import Activation, ModelConfig

# torch 2.13 on a CPU: the most elements that one thread computes alone, and the number of elements of a full vector.
_MAX_SERIAL_ELEMENTS = 2**14
_VECTOR_MULTIPLE = 64
_MKL_SMALL_ROWS = 10
_LINEAR_ROWS = {torch.float32: 4, torch.bfloat16: 2}
SMALL_PRODUCT = {torch.float32: 399, torch.bfloat16: 4096}
"""Most multiplications of a small product: single heads in float32, any product in bfloat16 (24 of 1,280,000 numbers
differed with 64 columns and 32 rows of a matrix, none with one row more)."""


def row_invariant(function: Callable[[Tensor], Tensor], x_TF: Tensor) -> Tensor:
    """function(x), such that the bits of a row do not depend on its position in x.

    torch computes the last elements of each thread's share, those that do not fill a vector, by another formula: with F
    50, or with 3 threads and F 512, rows of silu and gelu differed in a bit from batch to batch. So each call is too
    small to be split among threads, and its rows are full vectors and contiguous (other layouts use yet another gelu).
    """
    if torch.is_grad_enabled() or not x_TF.is_cpu:  # training needs no bitwise reproducibility
        return function(x_TF)
    n_columns = x_TF.shape[-1]
    padding = -n_columns % _VECTOR_MULTIPLE
    padded_TF = F.pad(x_TF, (0, padding)) if padding else x_TF.contiguous()
    if padded_TF.numel() <= _MAX_SERIAL_ELEMENTS:
        out_TF = function(padded_TF)
    else:
        out_TF = torch.cat(
            [function(slice_TF) for slice_TF in padded_TF.split(max(_MAX_SERIAL_ELEMENTS // padded_TF.shape[-1], 1))]
        )
    return out_TF[:, :n_columns] if padding else out_TF


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": partial(row_invariant, F.gelu),
    "gelu_tanh": partial(row_invariant, partial(F.gelu, approximate="tanh")),
    "silu": partial(row_invariant, F.silu),
    "relu2": lambda x: F.relu(x).square(),
}
"""Of one tensor, without parameters."""
_XIELU_BETA = 0.5
_SWIGLU_LIMIT, _SWIGLU_ALPHA = 7.0, 1.702


def activate_hidden(name: Activation, hidden_TX: Tensor, parameters: Tensor | None = None, *, gated: bool) -> Tensor:
    """[T, F]: the activation, or, if `gated`, activation(gate) * up of gate and up side by side.

    parameters: see activate().
    """
    if not gated:
        return activate(name, hidden_TX, parameters)
    gate_TF, up_TF = hidden_TX.chunk(2, dim=-1)
    if name == "swiglu_clamped":
        return _swiglu_clamped(gate_TF, up_TF)
    return activate(name, gate_TF, parameters) * up_TF


def _swiglu_clamped(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """Computed in float32, or in float64 if the numbers are."""
    wide = torch.promote_types(gate_TF.dtype, torch.float32)
    clamped_TF = gate_TF.to(wide).clamp(max=_SWIGLU_LIMIT)
    swish_TF = clamped_TF * row_invariant(torch.sigmoid, _SWIGLU_ALPHA * clamped_TF)
    return ((up_TF.to(wide).clamp(-_SWIGLU_LIMIT, _SWIGLU_LIMIT) + 1) * swish_TF).to(gate_TF.dtype)


def activate(name: Activation, x_TF: Tensor, parameters: Tensor | None = None) -> Tensor:
    """The activation of this name. parameters: see ACTIVATION_PARAMETERS in model/decoder_program.py."""
    return ACTIVATIONS[name](x_TF) if parameters is None else xielu(x_TF, activation_parameters(parameters))


def activation_parameters(parameters_2: Tensor) -> Tensor:
    """[2] float32: the curvature of xIELU right and left of 0, from the weights."""
    return F.softplus(parameters_2.float()) + parameters_2.new_tensor((0.0, _XIELU_BETA), dtype=torch.float32)


def xielu(x_TF: Tensor, curvature_2: Tensor) -> Tensor:
    """The activation of arXiv:2411.13010, computed in float32, or in float64 if x is."""
    wide_TF = x_TF if x_TF.dtype == torch.float64 else x_TF.float()

    def negative(part_TF: Tensor) -> Tensor:
        return torch.expm1(part_TF) - part_TF

    right, left = curvature_2.unbind()
    curve_TF = row_invariant(negative, wide_TF.clamp(max=0.0)) * left
    return (torch.where(wide_TF > 0, right * wide_TF * wide_TF, curve_TF) + _XIELU_BETA * wide_TF).to(x_TF.dtype)


def padded_rows(count: int, dtype: torch.dtype, numbers: int) -> int:
    """Rows to which `count` rows must be padded, so that their products have the same bits in any batch.

    numbers: of the smallest matrix. Measured on torch 2.13 with AVX512-BF16: float32 rows in fours, bfloat16 rows in
    pairs (single rows differ if 1,536 or more numbers are summed), and no product so small that torch uses another
    formula for it.
    """
    multiple, small = _LINEAR_ROWS[dtype], SMALL_PRODUCT[dtype] // numbers + 1
    return -(-max(count, small) // multiple) * multiple


def row_invariant_product(x_TK: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """product(x, weight, bias) with the same bits of a row for any number of rows."""
    if torch.is_grad_enabled() or not x_TK.is_cpu or x_TK.dtype not in _LINEAR_ROWS:
        return product(x_TK, weight, bias)
    count = len(x_TK)
    extra = padded_rows(count, x_TK.dtype, weight.numel()) - count
    return product(F.pad(x_TK, (0, 0, 0, extra)) if extra else x_TK, weight, bias)[:count]


class FastModule(nn.Module):
    """A module without nn.Module's hooks, whose overhead equals the computation at one token."""

    def __init_subclass__(cls) -> None:
        cls.__call__ = cls.forward  # type: ignore[method-assign]


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b. Pads if W has 10 rows or fewer: MKL's float32 sums then depend on the 16-byte alignment of x."""
    n_rows, n_columns = weight.shape
    if n_rows <= _MKL_SMALL_ROWS and n_columns % 4:
        x, weight = (F.pad(tensor, (0, -n_columns % 4)) for tensor in (x, weight))
    return F.linear(x, weight, bias)


class Linear(FastModule):
    """x [.., columns] -> [.., rows]."""

    def __init__(self, rows: int, columns: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self.product = product if rows <= _MKL_SMALL_ROWS else F.linear

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


class RMSNorm(FastModule):
    """x / root mean square, scaled by the weight, by 1 + weight, or not at all."""

    def __init__(self, size: int, eps: float, *, has_weight: bool = True, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size)) if has_weight else None
        self.shape = (size,)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        if self.offset and self.weight is not None:
            offset_normed = F.rms_norm(x.float(), self.shape, None, self.eps) * (1.0 + self.weight.float())
            return offset_normed.to(x.dtype)
        if self.weight is not None and torch.is_grad_enabled() and x.is_cpu and not torch.compiler.is_compiling():
            normed: Tensor = _RMSNormWithGradient.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
            return normed
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class _RMSNormWithGradient(Function):
    """rms_norm for training on a CPU, where autograd of torch's takes twice as long (7 % of a step, preset small)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_float = x.float()
        inverse = torch.linalg.vecdot(x_float, x_float)[..., None].div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x_float * inverse
        ctx.save_for_backward(normed, inverse, weight)
        ctx.dtype = x.dtype
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        scaled: Tensor = (normed * weight).to(dtype)
        return scaled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, inverse, weight = ctx.saved_tensors
        grad = grad.float()
        d_weight = torch.linalg.vecdot(grad.flatten(0, -2), normed.flatten(0, -2), dim=0)
        d_normed = grad * weight
        along = torch.linalg.vecdot(d_normed, normed)[..., None] / normed.shape[-1]
        return d_normed.addcmul_(normed, along, value=-1).mul_(inverse).to(ctx.dtype), d_weight, None


class LayerNorm(FastModule):
    """(x - mean) / standard deviation, scaled as by RMSNorm, and optionally shifted."""

    def __init__(self, size: int, eps: float, *, bias: bool, has_weight: bool = True, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size)) if has_weight else None
        self.bias = nn.Parameter(torch.empty(size)) if bias else None
        self.shape = (size,)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        if self.offset and self.weight is not None:
            bias = None if self.bias is None else self.bias.float()
            return F.layer_norm(x.float(), self.shape, 1.0 + self.weight.float(), bias, self.eps).to(x.dtype)
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


def cache_attributes(module: nn.Module) -> None:
    """Makes parameters plain attributes, for fast lookups; do not move or reload the module afterwards.

    Together with FastModule this saves 12 % of a decoder's time at one token (preset small, bfloat16, one thread: 770
    instead of 880 us).
    """
    for child in module.modules():
        child.__dict__.update(child._parameters | child._modules | child._buffers)


def make_norm(config: ModelConfig) -> nn.Module:
    """The norm of `config` over the width."""
    options = {"has_weight": config.norm_weight, "offset": config.norm_offset}
    match config.norm:
        case "rmsnorm":
            return RMSNorm(config.width, config.norm_eps, **options)
        case "layernorm":
            return LayerNorm(config.width, config.norm_eps, bias=config.norm_bias, **options)
    return nn.Identity()


def make_head_norm(config: ModelConfig, size: int) -> RMSNorm | None:
    """The norm of queries or of keys. size: of ModelConfig.head_norm_sizes."""
    if config.qk_norm == "none":
        return None
    return RMSNorm(size, config.norm_eps, has_weight=config.norm_weight, offset=config.norm_offset)


# Shape legend: T tokens, N heads, C head_dim, F half of the rotated dimensions.


def rotate(x_TNC: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    """Rotary positions in the half-split layout (element i pairs with element i + F), computed in float32.

    Training under autocast on a CPU computes them in the dtype of x (4 % of a step). Elements of a head beyond the
    first 2 F are not rotated.
    """
    if torch.is_autocast_enabled("cpu") and x_TNC.is_cpu:
        cos_T1F, sin_T1F = cos_T1F.to(x_TNC.dtype), sin_T1F.to(x_TNC.dtype)
    half, head_dim = cos_T1F.shape[-1], x_TNC.shape[-1]
    splits = (half, half) + (head_dim - 2 * half,) * (2 * half < head_dim)
    first_TNF, second_TNF, *unrotated = x_TNC.split(splits, dim=-1)
    rotated = (first_TNF * cos_T1F - second_TNF * sin_T1F, second_TNF * cos_T1F + first_TNF * sin_T1F)
    return torch.cat((*rotated, *unrotated), dim=-1).to(x_TNC.dtype)
