"""The operations of a step in plain torch, on any device: what other kernels are held against. Knows no triton.

Sums are taken in float64 and rounded where interface.py says so: then no order of summation shows in the result, and a
row comes out the same in any company. Nothing is read on the host, and no shape depends on a number. Shape legend:
interface.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from app.engine.gpu.kernels.interface import HeadsSpec, NormSpec
from app.engine.gpu.kernels.reference_attention import attention
from app.engine.gpu.kernels.reference_rows import advance, look_up
from app.engine.gpu.kernels.static_sampler import sample
from model.config import Activation
from model.nn.positions import rotate

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class ReferenceKernels:
    """`Kernels` without a kernel."""

    look_up = staticmethod(look_up)
    advance = staticmethod(advance)
    attention = staticmethod(attention)
    sample = staticmethod(sample)

    def add_norm(self, x_TD: Tensor, delta_TD: Tensor | None, norm: NormSpec) -> tuple[Tensor, Tensor]:
        """See Kernels.add_norm."""
        if delta_TD is not None:
            x_TD = x_TD + delta_TD
        match norm.kind:
            case "rmsnorm":
                return x_TD, _rms_norm(x_TD, norm.weight, norm.eps)
            case "layernorm":
                weight, bias = (None if part is None else part.double() for part in (norm.weight, norm.bias))
                normed_TD = F.layer_norm(x_TD.double(), x_TD.shape[-1:], weight, bias, norm.eps)
                return x_TD, normed_TD.to(x_TD.dtype)
        return x_TD, x_TD

    def split_heads(
        self,
        qkv_TX: Tensor,
        spec: HeadsSpec,
        positions_T: Tensor,
        rope_PC: Tensor | None,
        layer_cache: Tensor,
        slots_T: Tensor,
    ) -> Tensor:
        """See Kernels.split_heads."""
        heads_TNC = qkv_TX.unflatten(1, (-1, spec.head_dim))
        q_THC, k_TKC, v_TKC = heads_TNC.split((spec.n_heads, spec.n_kv_heads, spec.n_kv_heads), dim=1)
        if spec.q_norm is not None:
            q_THC = _rms_norm(q_THC, spec.q_norm, spec.eps)
        if spec.k_norm is not None:
            k_TKC = _rms_norm(k_TKC, spec.k_norm, spec.eps)
        if rope_PC is not None:
            cos_T1F, sin_T1F = rope_PC[positions_T.long()].unsqueeze(1).chunk(2, dim=-1)
            q_THC, k_TKC = rotate(q_THC, cos_T1F, sin_T1F), rotate(k_TKC, cos_T1F, sin_T1F)
        for half_XKC, new_TKC in zip(layer_cache.flatten(1, 2), (k_TKC, v_TKC), strict=True):
            _write(half_XKC, slots_T, new_TKC)
        factored_THC: Tensor = q_THC.contiguous() if spec.q_factor == 1.0 else q_THC * spec.q_factor
        return factored_THC

    def gate(self, hidden_TX: Tensor, activation: Activation, gated: bool) -> Tensor:
        """See Kernels.gate."""
        function = _ACTIVATIONS[activation]
        if not gated:
            return function(hidden_TX.double()).to(hidden_TX.dtype)
        gate_TF, up_TF = hidden_TX.chunk(2, dim=-1)
        return function(gate_TF.double()).to(hidden_TX.dtype) * up_TF


def _rms_norm(x_TX: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    normed_TX = F.rms_norm(x_TX.double(), x_TX.shape[-1:], None if weight is None else weight.double(), eps)
    return normed_TX.to(x_TX.dtype)


def _write(cache_XKC: Tensor, slots_T: Tensor, new_TKC: Tensor) -> None:
    """Slot -1 writes nothing, and what is written must not depend on it in shape: it rewrites the last slot.

    That one belongs to the block of nobody, so no other token of the step writes to it.
    """
    slots_T = slots_T.long()
    there_T11 = (slots_T >= 0)[:, None, None]
    slots_T = slots_T.where(slots_T >= 0, len(cache_XKC) - 1)
    cache_XKC.index_copy_(0, slots_T, new_TKC.where(there_T11, cache_XKC[-1]))
