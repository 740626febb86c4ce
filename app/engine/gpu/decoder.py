"""Forward pass of a decoder over the tokens of a step: runs model/decoder_program.py with GPU kernels.

Residual sums are fused with the next norm, and the split into heads with rotary positions and the cache write.
Shape legend: T tokens of the step, D width, V vocabulary, S rows with logits.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.engine.execution.torch_executor import groups_of
from app.engine.gpu.format_support import describe_unsupported
from app.engine.gpu.kernels.interface import (
    AttentionBatch,
    ExpertMatrices,
    ExpertsSpec,
    HeadsSpec,
    Kernels,
    NormSpec,
    RouterSpec,
    RowLookup,
)
from app.engine.gpu.padded_lm_head import padded_lm_head
from app.engine.memory.cache_groups import cache_places
from model.decoder_program import Kind, Operation, Register, decoder_program, is_read_again
from model.nn.feed_forward import RoutedExperts
from model.nn.layers import LayerNorm, RMSNorm, activation_parameters, cache_attributes
from model.nn.transformer import Decoder


class PagedDecoder:
    """The network of `decoder`, with its matrix products (app/engine/gpu/linears.py)."""

    def __init__(self, decoder: Decoder, kernels: Kernels) -> None:
        self.head = padded_lm_head(decoder)
        """Logits [S, V] of hidden states [S, D], in the number format of the weights; the row stride may exceed V."""
        cache_attributes(decoder)
        self.config = decoder.config
        assert describe_unsupported(self.config) is None
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
            (operation, module, self._spec(operation, module, decoder), is_read_again(operation.source, later))
            for index, operation in enumerate(operations)
            for module, later in [(modules[operation.module], operations[index + 1 :])]
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
        values: dict[Register, Any] = {stream: self._embed(lookups[0].tokens_T, positions_T)}
        delta_TD: Tensor | None = None  # the next norm adds it to the residual stream
        for operation, module, spec, is_kept in self._operations:
            source, target, layer = operation.source, operation.target, operation.layer
            take = values.__getitem__ if is_kept else values.pop
            match operation.kind:
                case Kind.NORM if source == Register.BRANCH:
                    delta_TD = kernels.add_norm(values.pop(source), None, spec)[1]
                case Kind.NORM:
                    out = (out_TD,) if target == Register.OUTPUT else ()
                    values[stream], values[target] = kernels.add_norm(values[stream], delta_TD, spec, *out)
                    delta_TD = None
                case Kind.ROPE_CACHE:
                    (heads_spec, width_norms, rope_PC), (group, place) = spec, self._places[layer]
                    qkv_TX = self._normed(values.pop(source), width_norms)
                    values[target] = kernels.split_heads(
                        qkv_TX, heads_spec, positions_T, rope_PC, caches[group][place], lookups[group].slots_T
                    )
                case Kind.ATTENTION:
                    (group, place), q_THC = self._places[layer], values.pop(source)
                    out_THC = kernels.attention(q_THC, caches[group][place], batches[group], *spec)
                    values[target] = out_THC.flatten(1)
                case Kind.ROUTE:
                    values[target] = kernels.route(take(source), spec, lookups[0].tile_rows_T)
                case Kind.LINEAR | Kind.ADD | Kind.EXPERTS:
                    if operation.kind == Kind.EXPERTS:
                        out_TX = kernels.experts(take(source), values.pop(Register.ROUTES), spec)
                    else:
                        out_TX = module(take(source)) if module else take(source)
                        if operation.activation:
                            out_TX = kernels.gate(out_TX, operation.activation, operation.gated, spec)
                    if operation.factor != 1.0:
                        out_TX = out_TX * operation.factor
                    if not operation.accumulates:
                        values[target] = out_TX
                        continue
                    if delta_TD is not None:
                        values[stream] = values[stream] + delta_TD
                    delta_TD = out_TX

    def _spec(self, operation: Operation, module: Any, decoder: Decoder) -> Any:
        """The specification for the kernel of an operation."""
        config, layer = self.config, self.config.layer_kind(operation.layer)
        attention: Any = decoder.blocks[operation.layer].attention
        match operation.kind:
            case Kind.NORM:
                return _norm_spec(module) if module else NormSpec(kind=operation.norm, eps=config.norm_eps)
            case Kind.ATTENTION:
                return layer.window, config.attention_soft_cap, attention.sinks
            case Kind.ROUTE:
                assert config.experts
                mixture: Any = decoder.blocks[operation.layer].mlp
                router = mixture.router
                return RouterSpec(
                    experts=config.experts,
                    weight_ED=router.weight,
                    bias_E=router.bias,
                    choice_bias_E=mixture.choice_bias,
                )
            case Kind.EXPERTS:
                return _experts_spec(module)
            case Kind.LINEAR if operation.parameters:
                return activation_parameters(decoder.get_parameter(operation.parameters[0].name))
            case Kind.ROPE_CACHE:
                norms = [
                    _head_factors(norm, self.embedding) if norm else None
                    for norm in (attention.q_norm, attention.k_norm)
                ]
                has_width_norms = config.qk_norm == "width"
                q_norm, k_norm = (None, None) if has_width_norms else norms
                spec = HeadsSpec(
                    n_heads=config.n_heads,
                    n_kv_heads=config.n_kv_heads,
                    head_dim=config.head_dim,
                    turned_dim=config.rotated_dim(layer.rope),
                    q_norm=q_norm,
                    k_norm=k_norm,
                    eps=config.norm_eps,
                    norms_after=config.qk_norm_after_rope,
                    query_scale_P=decoder._buffers["query_scale_P"],
                    q_factor=config.q_factor,
                )
                width_norms = [NormSpec(kind="rmsnorm", weight=weight, eps=config.norm_eps) for weight in norms]
                return (
                    spec,
                    width_norms if has_width_norms else [],
                    decoder.rope_table(layer.rope) if layer.rope else None,
                )

    def _normed(self, qkv_TX: Tensor, norms: list[NormSpec]) -> Tensor:
        """With the queries and the keys of a token normed together, if there are norms."""
        if not norms:
            return qkv_TX
        queries, keys = (heads * self.config.head_dim for heads in (self.config.n_heads, self.config.n_kv_heads))
        *parts, values_TX = qkv_TX.split((queries, keys, keys), dim=1)
        normed = [
            self._kernels.add_norm(part_TX.contiguous(), None, norm)[1]
            for part_TX, norm in zip(parts, norms, strict=True)
        ]
        return torch.cat((*normed, values_TX), dim=1)

    def _embed(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        x_TD = F.embedding(tokens_T, self.embedding)
        if self.config.embedding_scale != 1.0:
            x_TD = x_TD * self.config.embedding_scale
        if self._sinusoids_PD is not None:
            return x_TD + F.embedding(positions_T, self._sinusoids_PD).to(x_TD.dtype)
        return x_TD if self._positions_PD is None else x_TD + F.embedding(positions_T, self._positions_PD)


def _experts_spec(experts: RoutedExperts) -> ExpertsSpec:
    up, down = experts.packed or (None, None)
    return ExpertsSpec(
        up=ExpertMatrices(up or experts.up, experts.up_bias),
        down=ExpertMatrices(down or experts.down, experts.down_bias),
        activation=experts.name,
        gated=experts.gated,
    )


def _norm_spec(module: nn.Module) -> NormSpec:
    if isinstance(module, RMSNorm):
        return NormSpec(kind="rmsnorm", weight=_factors(module), bias=None, eps=module.eps)
    if isinstance(module, LayerNorm):
        return NormSpec(kind="layernorm", weight=_factors(module), bias=module.bias, eps=module.eps)
    return NormSpec(kind="none", weight=None, bias=None, eps=0.0)


def _factors(norm: RMSNorm | LayerNorm) -> Tensor | None:
    """What the norm multiplies by; None for ones."""
    return 1.0 + norm.weight.float() if norm.offset and norm.weight is not None else norm.weight


def _head_factors(norm: RMSNorm, like: Tensor) -> Tensor:
    """As _factors(), with the ones."""
    factors = _factors(norm)
    return like.new_ones(norm.shape) if factors is None else factors
