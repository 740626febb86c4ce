"""Forward pass of a decoder over the tokens of a step, written in the few operations that have GPU kernels.

The same network as model/nn/transformer.py, which is its reference: residual sums are fused with the next norm, and the
split into heads with rotary positions and the cache write. TorchExecutor runs models with an encoder.
Shape legend: T tokens of the step, D width, V vocabulary, S rows with logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from app.engine.gpu.kernels.interface import AttentionBatch, AttentionSpec, HeadsSpec, Kernels, NormSpec
from app.engine.gpu.linears import padded_lm_head
from model.config import ModelConfig
from model.nn.layers import LayerNorm, RMSNorm, cache_attributes
from model.nn.transformer import Block, Decoder


class PagedDecoder:
    """The network of `decoder`, with its matrix products (app/engine/gpu/linears.py)."""

    def __init__(self, decoder: Decoder, kernels: Kernels) -> None:
        assert not decoder.config.n_encoder_layers, "TorchExecutor runs models with an encoder"
        self.head = padded_lm_head(decoder)
        """Logits [S, V] of hidden states [S, D], in the number format of the weights; the row stride may exceed V."""
        cache_attributes(decoder)
        self.config = decoder.config
        self._kernels = kernels
        self.embedding = decoder.embedding
        """Never quantized; it defines device and number format of a step."""
        self._positions_PD = decoder.position_embedding
        self._rope_PC: Tensor | None = decoder._buffers["rope_PC"]
        self._sinusoids_PD: Tensor | None = decoder._buffers["sinusoids_PD"]
        self._layers = [_Layer(self.config, block) for block in decoder.blocks if isinstance(block, Block)]
        self._norm = _norm(decoder.norm)

    def __call__(
        self, cache: Tensor, tokens_T: Tensor, positions_T: Tensor, slots_T: Tensor, batch: AttentionBatch
    ) -> Tensor:
        """Hidden states [T, D] after the final norm; writes keys and values to `slots_T` of the cache."""
        step = _Step(cache, positions_T, slots_T, batch)
        x_TD, delta_TD = self._embed(tokens_T, positions_T), None
        for layer in self._layers:
            x_TD, delta_TD = self._layer(layer, x_TD, delta_TD, step)
        return self._kernels.add_norm(x_TD, delta_TD, self._norm)[1]

    def _layer(self, layer: _Layer, x_TD: Tensor, delta_TD: Tensor | None, step: _Step) -> tuple[Tensor, Tensor | None]:
        """Returns the residual stream and a delta, which the next norm adds to it."""
        add_norm = self._kernels.add_norm
        if self.config.norm_position == "post":
            x_TD = add_norm(x_TD, self._attend(layer, x_TD, step), layer.norm_attention)[1]
            return (add_norm(x_TD, self._mlp(layer, x_TD), layer.norm_mlp)[1] if layer.up else x_TD), None
        x_TD, normed_TD = add_norm(x_TD, delta_TD, layer.norm_attention)
        attended_TD = self._attend(layer, normed_TD, step)
        if not layer.up:
            return x_TD, attended_TD
        if self.config.parallel_residual:
            normed_TD = add_norm(x_TD, None, layer.norm_mlp)[1]
            return x_TD + attended_TD, self._mlp(layer, normed_TD)
        x_TD, normed_TD = add_norm(x_TD, attended_TD, layer.norm_mlp)
        return x_TD, self._mlp(layer, normed_TD)

    def _attend(self, layer: _Layer, x_TD: Tensor, step: _Step) -> Tensor:
        layer_cache, kernels = step.cache[layer.index], self._kernels
        qkv_TX = layer.qkv(x_TD)
        q_THC = kernels.split_heads(qkv_TX, layer.heads, step.positions_T, self._rope_PC, layer_cache, step.slots_T)
        out_TD = kernels.attention(q_THC, layer_cache, step.batch, layer.attention).flatten(1)
        return out_TD if layer.out is None else layer.out(out_TD)

    def _mlp(self, layer: _Layer, x_TD: Tensor) -> Tensor:
        assert layer.up and layer.down
        down_TD: Tensor = layer.down(self._kernels.gate(layer.up(x_TD), self.config.activation, self.config.gated))
        return down_TD

    def _embed(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        x_TD = F.embedding(tokens_T, self.embedding)
        if self.config.embedding_scale != 1.0:
            x_TD = x_TD * self.config.embedding_scale
        if self._sinusoids_PD is not None:
            return x_TD + F.embedding(positions_T, self._sinusoids_PD).to(x_TD.dtype)
        return x_TD if self._positions_PD is None else x_TD + F.embedding(positions_T, self._positions_PD)


class _Step(NamedTuple):
    """Inputs of attention for a step."""

    cache: Tensor
    positions_T: Tensor
    slots_T: Tensor
    batch: AttentionBatch


class _Layer:
    """A block's products and kernel specifications."""

    def __init__(self, config: ModelConfig, block: Block) -> None:
        attention, mlp = block.attention, block.mlp
        self.index = attention.layer
        self.norm_attention = _norm(block.norm_attention)
        self.norm_mlp = _norm(block.norm_mlp)
        self.qkv, self.out = attention.qkv, attention.out
        self.up = mlp.up if mlp else None
        self.down = mlp.down if mlp else None
        self.attention = AttentionSpec(window=config.sliding_window)
        self.heads = HeadsSpec(
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            turned_dim=config.effective_rotary_dim,
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
