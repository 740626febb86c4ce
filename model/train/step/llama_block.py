"""Block and head of the llama layout with handwritten backward passes, for training on a CPU.

Memory passes besides the matrix products took half of the time, so this minimizes them: norm weights are folded into
the next matrix once per step (their gradients derive from the matrix's), queries and keys are rotated while being
copied to attention's layout, and gradients accumulate in place instead of in new memory.

Shape legend: T tokens, D width, H query heads, K kv heads, G = H / K, C head_dim, B sequences, N tokens of each,
F mlp_width, V vocabulary, W = (H + 2 K) C.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from model.config import ModelConfig
from model.nn.layers import RMSNorm
from model.nn.transformer import Block, Decoder
from model.train.step.attention import (
    Positions,
    Tile,
    attention,
    attention_backward,
    by_kv_heads,
    from_heads,
    from_kv_heads,
    to_heads,
)

_SWITCHES = {
    "norm": "rmsnorm",
    "norm_position": "pre",
    "final_norm": True,
    "positions": "rotary",
    "activation": "silu",
    "gated": True,
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
    "head_bias": False,
    "out_projection": True,
    "qk_norm": False,
    "parallel_residual": False,
    "attention_scale": "head_dim",
    "logit_soft_cap": None,
    "n_encoder_layers": 0,
    "rotary_dim": None,
    "embedding_scale": 1.0,
}
"""Settings that are implemented here."""


def is_llama(config: ModelConfig) -> bool:
    """Whether FoldedWeights.logits() supports this config."""
    return config.mlp_width > 0 and all(getattr(config, name) == value for name, value in _SWITCHES.items())


class FoldedWeights:
    """A decoder's matrices in the compute dtype, with norm weights folded in; valid until the next update."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype) -> None:
        self.decoder = decoder
        self.blocks = [_folded(block, dtype) for block in decoder.blocks if isinstance(block, Block)]
        self.head_VD = _scaled(_head(decoder), _scale(decoder.norm), dtype)
        self.rope_PC = decoder.get_buffer("rope_PC").to(dtype)

    def logits(self, inputs_BN: Tensor, tiles: list[Tile]) -> Tensor:
        """[T, V]."""
        decoder, length = self.decoder, inputs_BN.shape[1]
        group = decoder.config.n_heads // decoder.config.n_kv_heads
        positions = Positions.make(self.rope_PC[:length], group, tiles)
        x_TD = F.embedding(inputs_BN.flatten(), decoder.embedding)
        for block, folded in zip(decoder.blocks, self.blocks, strict=True):
            assert isinstance(block, Block)
            x_TD = _Block.apply(x_TD, positions, decoder.config, folded, *_parameters(block))  # type: ignore[no-untyped-call]
        scale_D = _scale(decoder.norm)
        logits_TV: Tensor = _Head.apply(x_TD, self.head_VD, decoder.config.norm_eps, scale_D, _head(decoder))  # type: ignore[no-untyped-call]
        return logits_TV


class _Block(Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, positions: Positions, config: ModelConfig, folded: list[Tensor], *parameters: Tensor
    ) -> Tensor:
        qkv_WD, out_DH, up_FD, down_DF = folded
        normed_TD, inverse_T1 = _norm(x_TD, config.norm_eps, qkv_WD.dtype)
        q_MRC, k_MNC, v_MNC = to_heads(normed_TD @ qkv_WD.mT, positions, config)
        out_MRC, weights = attention(q_MRC, k_MNC, v_MNC, positions.tiles)
        attended_TH = from_kv_heads(out_MRC, config)
        middle_TD = x_TD + attended_TH @ out_DH.mT
        normed2_TD, inverse2_T1 = _norm(middle_TD, config.norm_eps, up_FD.dtype)
        hidden_TF = normed2_TD @ up_FD.mT
        gate_TF, up_TF = hidden_TF.chunk(2, dim=-1)
        silu_TF = F.silu(gate_TF)
        inner_TF = silu_TF * up_TF
        saved = (normed_TD, inverse_T1, q_MRC, k_MNC, v_MNC, attended_TH, normed2_TD, inverse2_T1, hidden_TF, silu_TF)
        ctx.save_for_backward(*saved, inner_TF, *parameters, *weights)
        ctx.others = positions, config, folded
        return middle_TD.add_(inner_TF @ down_DF.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        normed_TD, inverse_T1, q, k, v, attended_TH, normed2_TD, inverse2_T1, hidden_TF, silu_TF, *rest = (
            ctx.saved_tensors
        )
        inner_TF, scale_D, qkv_param, _, scale2_D, up_param, _, *weights = rest
        positions, config, (qkv_WD, out_DH, up_FD, down_DF) = ctx.others
        dout_TD = grad_TD.to(down_DF.dtype)
        d_down = _outer(dout_TD, inner_TF)
        dhidden_TF = _swiglu_backward(dout_TD @ down_DF, hidden_TF, silu_TF)
        d_up, d_scale2 = _unfolded(_outer(dhidden_TF, normed2_TD), scale2_D, up_param)
        grad_TD = _norm_backward(dhidden_TF @ up_FD, normed2_TD, inverse2_T1, grad_TD)
        dout_TD = grad_TD.to(out_DH.dtype)
        d_out = _outer(dout_TD, attended_TH)
        dout_MRC = by_kv_heads(dout_TD @ out_DH, positions, config)
        dqkv_TW = from_heads(*attention_backward(dout_MRC, q, k, v, weights, positions.tiles), positions, config)
        d_qkv, d_scale = _unfolded(_outer(dqkv_TW, normed_TD), scale_D, qkv_param)
        grad_TD = _norm_backward(dqkv_TW @ qkv_WD, normed_TD, inverse_T1, grad_TD)
        return grad_TD, None, None, None, d_scale, d_qkv, d_out, d_scale2, d_up, d_down


class _Head(Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, head_VD: Tensor, eps: float, scale_D: Tensor, matrix_VD: Tensor) -> Tensor:
        normed_TD, inverse_T1 = _norm(x_TD, eps, head_VD.dtype)
        ctx.save_for_backward(normed_TD, inverse_T1, scale_D, matrix_VD)
        ctx.head_VD = head_VD
        return normed_TD @ head_VD.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TV: Tensor) -> tuple[Tensor | None, ...]:
        normed_TD, inverse_T1, scale_D, matrix_VD = ctx.saved_tensors
        d_matrix, d_scale = _unfolded(_outer(grad_TV, normed_TD), scale_D, matrix_VD)
        zeros_TD = torch.zeros(normed_TD.shape, device=normed_TD.device)
        return _norm_backward(grad_TV @ ctx.head_VD, normed_TD, inverse_T1, zeros_TD), None, None, d_scale, d_matrix


def _scale(norm: nn.Module) -> Tensor:
    assert isinstance(norm, RMSNorm)
    return norm.weight


def _parameters(block: Block) -> tuple[Tensor, ...]:
    assert block.mlp is not None and block.norm_mlp is not None and block.attention.out is not None
    attention_part = (_scale(block.norm_attention), block.attention.qkv.weight, block.attention.out.weight)
    return *attention_part, _scale(block.norm_mlp), block.mlp.up.weight, block.mlp.down.weight


def _folded(block: Block, dtype: torch.dtype) -> list[Tensor]:
    scale_D, qkv_WD, out_DH, scale2_D, up_FD, down_DF = _parameters(block)
    plain = [matrix.detach().to(dtype) for matrix in (out_DH, down_DF)]
    return [_scaled(qkv_WD, scale_D, dtype), plain[0], _scaled(up_FD, scale2_D, dtype), plain[1]]


def _scaled(matrix_ED: Tensor, scale_D: Tensor, dtype: torch.dtype) -> Tensor:
    return (matrix_ED.detach() * scale_D.detach()).to(dtype)


def _unfolded(grad_ED: Tensor, scale_D: Tensor, matrix_ED: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of matrix and scale from that of their product, which is overwritten."""
    d_scale_D = torch.linalg.vecdot(grad_ED, matrix_ED, dim=0)
    return grad_ED.mul_(scale_D), d_scale_D


def _head(decoder: Decoder) -> Tensor:
    return decoder.embedding if decoder.untied_head is None else decoder.untied_head


def _outer(grad_TE: Tensor, x_TD: Tensor) -> Tensor:
    """Gradient of a matrix, in float32."""
    return (grad_TE.mT @ x_TD).float()


def _norm(x_TD: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / root mean square, and the factor applied."""
    norm_T1 = torch.linalg.vector_norm(x_TD, dim=-1, keepdim=True)
    inverse_T1 = norm_T1.square_().div_(x_TD.shape[-1]).add_(eps).rsqrt_()
    return (x_TD * inverse_T1).to(dtype), inverse_T1


def _norm_backward(grad_TD: Tensor, normed_TD: Tensor, inverse_T1: Tensor, passed_TD: Tensor) -> Tensor:
    """Gradient of x: through the norm, plus the residual's."""
    along_T1 = torch.linalg.vecdot(grad_TD, normed_TD)[:, None] / grad_TD.shape[-1]  # mean() takes 1.6 times as long
    through_TD = grad_TD.addcmul_(normed_TD, along_T1, value=-1)
    return torch.addcmul(passed_TD, through_TD.float(), inverse_T1)


def _swiglu_backward(dinner_TF: Tensor, hidden_TF: Tensor, silu_TF: Tensor) -> Tensor:
    gate_TF, up_TF = hidden_TF.chunk(2, dim=-1)
    dhidden_TF = torch.empty_like(hidden_TF)
    dgate_TF, dup_TF = dhidden_TF.chunk(2, dim=-1)
    torch.mul(dinner_TF, silu_TF, out=dup_TF)
    torch.ops.aten.silu_backward.grad_input(dinner_TF.mul_(up_TF), gate_TF, grad_input=dgate_TF)
    return dhidden_TF
