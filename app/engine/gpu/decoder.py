"""A decoder's pass over the tokens of a step, written in the few operations that a GPU has kernels for.

The same network as model/transformer.py, which is its oracle: sums are fused with the norm behind them, the heads with
rotary positions and the cache. Knows no requests, no rows of a table, no sampling. An encoder is TorchCompute's.
Shape legend: T tokens of the step, D width, V vocabulary, S rows that want logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.engine.kernels.face import AttentionBatch, AttentionSpec, HeadsSpec, Kernels, NormSpec
from model.block import Attention, Block, FeedForward
from model.config import ModelConfig
from model.layers import LayerNorm, RMSNorm
from model.transformer import Decoder

Product = Callable[[Tensor], Tensor]
MakeLinear = Callable[[Tensor, Tensor | None], Product]


class PagedDecoder:
    """Holds the weights as `make_linear` wants them; `decoder` is not needed any more afterwards."""

    def __init__(self, decoder: Decoder, kernels: Kernels, make_linear: MakeLinear) -> None:
        assert not decoder.config.n_encoder_layers, "sources are read by TorchCompute"
        self.config = decoder.config
        self._kernels = kernels
        self._embedding, self._positions = decoder.embedding, decoder.position_embedding
        self._rope_PC: Tensor | None = decoder._buffers["rope_PC"]
        self._sinusoids_PD: Tensor | None = decoder._buffers["sinusoids_PD"]
        self._blocks = [_Layer(self.config, block, make_linear) for block in decoder.blocks if isinstance(block, Block)]
        self._norm = _norm(decoder.norm)
        tied = decoder.untied_head is None
        matrix = decoder.embedding if decoder.untied_head is None else decoder.untied_head
        self._head = _plain(matrix, decoder.head_bias) if tied else make_linear(matrix, decoder.head_bias)

    def __call__(
        self, cache: Tensor, tokens_T: Tensor, positions_T: Tensor, slots_T: Tensor, batch: AttentionBatch
    ) -> Tensor:
        """Hidden states [T, D] after the final norm; keys and values go to `slots` of the cache."""
        x_TD, delta_TD = self._embed(tokens_T, positions_T), None

        def attend(layer: _Layer, normed_TD: Tensor) -> Tensor:
            own = cache[layer.index]
            q_THC = self._kernels.split_heads(
                layer.qkv(normed_TD), layer.heads, positions_T, self._rope_PC, own, slots_T
            )
            out_TD = self._kernels.attention(q_THC, own, batch, layer.attention).flatten(1)
            return out_TD if layer.out is None else layer.out(out_TD)

        for layer in self._blocks:
            x_TD, delta_TD = self._layer(layer, x_TD, delta_TD, attend)
        return self._kernels.add_norm(x_TD, delta_TD, self._norm)[1]

    def head(self, hidden_SD: Tensor) -> Tensor:
        """Logits [S, V], in the number format of the weights."""
        logits_SV = self._head(hidden_SD)
        cap = self.config.logit_soft_cap
        return logits_SV if cap is None else cap * torch.tanh(logits_SV / cap)

    def _layer(
        self, layer: _Layer, x_TD: Tensor, delta_TD: Tensor | None, attend: Callable[[_Layer, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """The stream, and what is still to be added to it: the next norm does that on its way."""
        add_norm = self._kernels.add_norm
        if self.config.norm_position == "post":
            x_TD = add_norm(x_TD, attend(layer, x_TD), layer.norm_attention)[1]
            return (add_norm(x_TD, self._mlp(layer, x_TD), layer.norm_mlp)[1] if layer.up else x_TD), None
        x_TD, normed_TD = add_norm(x_TD, delta_TD, layer.norm_attention)
        attended_TD = attend(layer, normed_TD)
        if not layer.up:
            return x_TD, attended_TD
        if self.config.parallel_residual:
            normed_TD = add_norm(x_TD, None, layer.norm_mlp)[1]
            return x_TD + attended_TD, self._mlp(layer, normed_TD)
        x_TD, normed_TD = add_norm(x_TD, attended_TD, layer.norm_mlp)
        return x_TD, self._mlp(layer, normed_TD)

    def _mlp(self, layer: _Layer, x_TD: Tensor) -> Tensor:
        assert layer.up and layer.down
        return layer.down(self._kernels.gate(layer.up(x_TD), self.config.activation, self.config.gated))

    def _embed(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        x_TD = F.embedding(tokens_T, self._embedding)
        if self.config.embedding_scale != 1.0:
            x_TD = x_TD * self.config.embedding_scale
        if self._sinusoids_PD is not None:
            return x_TD + F.embedding(positions_T, self._sinusoids_PD).to(x_TD.dtype)
        return x_TD if self._positions is None else x_TD + F.embedding(positions_T, self._positions)


class _Layer:
    """A block's matrices as products, and what the kernels must know of it."""

    def __init__(self, config: ModelConfig, block: Block, make_linear: MakeLinear) -> None:
        attention: Attention = block.attention
        mlp: FeedForward | None = block.mlp
        self.index = attention.layer
        self.norm_attention = _norm(block.norm_attention)
        self.norm_mlp = _norm(block.norm_mlp)
        self.qkv = make_linear(attention.qkv.weight, attention.qkv.bias)
        self.out = make_linear(attention.out.weight, attention.out.bias) if attention.out else None
        self.up = make_linear(mlp.up.weight, mlp.up.bias) if mlp else None
        self.down = make_linear(mlp.down.weight, mlp.down.bias) if mlp else None
        self.attention = AttentionSpec(window=config.sliding_window, soft_cap=None)
        self.heads = HeadsSpec(
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            turned_dim=config.turned_dim if config.positions == "rotary" else 0,
            q_norm=attention.q_norm.weight if attention.q_norm else None,
            k_norm=attention.k_norm.weight if attention.k_norm else None,
            eps=config.norm_eps,
            q_factor=attention.q_factor,
        )


def _norm(module: nn.Module | None) -> NormSpec:
    if isinstance(module, RMSNorm):
        return NormSpec(kind="rmsnorm", weight=module.weight, bias=None, eps=module.eps)
    if isinstance(module, LayerNorm):
        return NormSpec(kind="layernorm", weight=module.weight, bias=module.bias, eps=module.eps)
    return NormSpec(kind="none", weight=None, bias=None, eps=0.0)


def _plain(weight: Tensor, bias: Tensor | None) -> Product:
    return lambda x: F.linear(x, weight, bias)
