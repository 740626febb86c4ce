"""Forward pass of a decoder over the tokens of a step: runs model/decoder_program.py with GPU kernels.

Residual sums are fused with the next norm, and the split into heads with rotary positions and the cache write.
Shape legend: T tokens of the step, D width, V vocabulary, S rows with logits.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from app.engine.execution.torch_executor import groups_of
from app.engine.gpu.kernels.interface import AttentionBatch, HeadsSpec, Kernels, NormSpec, RowLookup
from app.engine.gpu.padded_lm_head import padded_lm_head
from app.engine.memory.cache_groups import cache_places
from model.decoder_program import Kind, Operation, Register, decoder_program
from model.nn.layers import LayerNorm, RMSNorm, cache_attributes
from model.nn.transformer import Decoder


class PagedDecoder:
    """The network of `decoder`, with its matrix products (app/engine/gpu/linears.py)."""

    def __init__(self, decoder: Decoder, kernels: Kernels) -> None:
        self.head = padded_lm_head(decoder)
        """Logits [S, V] of hidden states [S, D], in the number format of the weights; the row stride may exceed V."""
        cache_attributes(decoder)
        self.config = decoder.config
        self._kernels = kernels
        self.embedding = decoder.embedding
        """Never quantized; it defines device and number format of a step."""
        self._positions_PD = decoder.position_embedding
        self._sinusoids_PD: Tensor | None = decoder._buffers["sinusoids_PD"]
        _embed, *operations, _head = decoder_program(decoder.config)
        assert all(op.target == Register.RESIDUAL for op in operations if op.accumulates), "what the next norm adds"
        self.groups = groups_of(decoder)
        self._places = cache_places(self.groups)
        modules = {**dict(decoder.named_modules()), "": None}  # which calls the decoder itself ""
        self._operations = [
            (operation, module, self._spec(operation, module, decoder))
            for operation in operations
            for module in [modules[operation.module]]
        ]

    def __call__(
        self, caches: Items[Tensor], lookups: Items[RowLookup], batches: Items[AttentionBatch], out_TD: Tensor
    ) -> None:
        """Writes hidden states after the final norm to `out_TD`, and keys and values to the caches.

        caches, lookups, batches: of each cache group.
        """
        kernels, config, stream = self._kernels, self.config, Register.RESIDUAL
        positions_T = lookups[0].positions_T
        heads = (config.n_heads, config.n_kv_heads, config.head_dim)
        batches = [
            kernels.divide_attention(batch, *heads, group.window)
            for batch, group in zip(batches, self.groups, strict=True)
        ]
        values = {stream: self._embed(lookups[0].tokens_T, positions_T)}
        delta_TD: Tensor | None = None  # the next norm adds it to the residual stream
        for operation, module, spec in self._operations:
            source, target, layer = operation.source, operation.target, operation.layer
            match operation.kind:
                case Kind.NORM:
                    out = (out_TD,) if target == Register.OUTPUT else ()
                    values[stream], values[target] = kernels.add_norm(values[stream], delta_TD, spec, *out)
                    delta_TD = None
                case Kind.ROPE_CACHE:
                    (heads_spec, rope_PC), qkv_TX, (group, place) = spec, values.pop(source), self._places[layer]
                    values[target] = kernels.split_heads(
                        qkv_TX, heads_spec, positions_T, rope_PC, caches[group][place], lookups[group].slots_T
                    )
                case Kind.ATTENTION:
                    (group, place), q_THC = self._places[layer], values.pop(source)
                    values[target] = kernels.attention(q_THC, caches[group][place], batches[group], spec).flatten(1)
                case Kind.LINEAR | Kind.ADD:
                    out_TX = module(values.pop(source)) if module else values.pop(source)
                    if operation.activation:
                        out_TX = kernels.gate(out_TX, operation.activation, operation.gated)
                    if not operation.accumulates:
                        values[target] = out_TX
                        continue
                    if delta_TD is not None:
                        values[stream] = values[stream] + delta_TD
                    delta_TD = out_TX

    def _spec(self, operation: Operation, module: Any, decoder: Decoder) -> Any:
        """The specification for the kernel of an operation."""
        config, layer = self.config, self.config.layer_kind(operation.layer)
        match operation.kind:
            case Kind.NORM:
                return _norm_spec(module)
            case Kind.ATTENTION:
                return layer.window
            case Kind.ROPE_CACHE:
                q_norm, k_norm, *_ = *(decoder.get_parameter(weight.name) for weight in operation.weights), None, None
                spec = HeadsSpec(
                    n_heads=config.n_heads,
                    n_kv_heads=config.n_kv_heads,
                    head_dim=config.head_dim,
                    turned_dim=config.rotated_dim(layer.rope),
                    q_norm=q_norm,
                    k_norm=k_norm,
                    eps=config.norm_eps,
                    q_factor=config.q_factor,
                )
                return spec, decoder.rope_table(layer.rope) if layer.rope else None

    def _embed(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        x_TD = F.embedding(tokens_T, self.embedding)
        if self.config.embedding_scale != 1.0:
            x_TD = x_TD * self.config.embedding_scale
        if self._sinusoids_PD is not None:
            return x_TD + F.embedding(positions_T, self._sinusoids_PD).to(x_TD.dtype)
        return x_TD if self._positions_PD is None else x_TD + F.embedding(positions_T, self._positions_PD)


def _norm_spec(module: nn.Module | None) -> NormSpec:
    if isinstance(module, RMSNorm):
        return NormSpec(kind="rmsnorm", weight=module.weight, bias=None, eps=module.eps)
    if isinstance(module, LayerNorm):
        return NormSpec(kind="layernorm", weight=module.weight, bias=module.bias, eps=module.eps)
    return NormSpec(kind="none", weight=None, bias=None, eps=0.0)
