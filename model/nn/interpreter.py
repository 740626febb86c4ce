"""Runs a decoder's list of operations (model/decoder_program.py) in torch.

Shape legend: T tokens of the step, D width, H query heads, K kv heads, N = H + K, C head_dim, F mlp_width, X any width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from model.decoder_program import Kind, Operation, Register, decoder_program
from model.nn.attention import Attend, CrossAttend
from model.nn.layers import ACTIVATIONS, rotate
from model.nn.transformer import Decoder, Rotation


class Interpreter:
    """Computes the hidden states of a decoder, with the bits of Decoder.forward."""

    def __init__(self, decoder: Decoder) -> None:
        """The modules are looked up once: quantize them before."""
        config = decoder.config
        self._decoder, self._config = decoder, config
        modules: dict[str, Any] = {**dict(decoder.named_modules()), "": None}  # which calls the decoder itself ""
        self._operations = [
            (operation, modules[operation.module])
            for operation in decoder_program(config)
            if operation.kind not in (Kind.EMBED, Kind.HEAD)
        ]
        self._rotations = [config.ropes.index(kind.rope) if kind.rope else -1 for kind in config.layers]
        self._head_norms: list[tuple[Any, ...]] = [
            tuple(modules.get(f"blocks.{layer}.attention.{norm}") for norm in ("q_norm", "k_norm"))
            for layer in range(config.n_layers)
        ]
        self._q_factor = config.q_factor

    def __call__(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, cross: CrossAttend | None = None
    ) -> Tensor:
        """See Decoder.forward."""
        x_TD, rotations = self._decoder.embed(tokens_T, positions_T)
        values: dict[Register, Any] = {Register.RESIDUAL: x_TD}
        for operation, module in self._operations:
            source, target, layer = operation.source, operation.target, operation.layer
            value = values[source] if source == Register.RESIDUAL else values.pop(source)
            match operation.kind:
                case Kind.NORM:
                    result = module(value) if module else value
                case Kind.LINEAR:
                    result = _activated(operation, module(value))
                case Kind.ROPE_CACHE:
                    result = self._split_heads(layer, value, rotations[self._rotations[layer]])
                case Kind.ATTENTION:
                    result = attend(layer, *value).flatten(1)
                case Kind.CROSS_ATTENTION:
                    assert cross is not None, "a decoder with an encoder needs a source"
                    result = cross(layer, self._scaled(value.view(len(value), -1, self._config.head_dim))).flatten(1)
                case Kind.ADD:
                    result = value
            values[target] = values[target] + result if operation.accumulates else result
        hidden_TD: Tensor = values[Register.OUTPUT]
        return hidden_TD

    def _split_heads(self, layer: int, qkv_TX: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, C], keys and values [T, K, C]."""
        n_heads, n_kv_heads = self._config.n_heads, self._config.n_kv_heads
        heads_TXC = qkv_TX.view(len(qkv_TX), -1, self._config.head_dim)
        qk_TNC, v_TKC = heads_TXC.tensor_split((n_heads + n_kv_heads,), dim=1)
        q_norm, k_norm = self._head_norms[layer]
        if q_norm:
            q_THC, k_TKC = qk_TNC.tensor_split((n_heads,), dim=1)
            q_THC, k_TKC = q_norm(q_THC), k_norm(k_TKC)
            if rotation:
                q_THC, k_TKC = rotate(q_THC, *rotation), rotate(k_TKC, *rotation)
        else:
            q_THC, k_TKC = (rotate(qk_TNC, *rotation) if rotation else qk_TNC).tensor_split((n_heads,), dim=1)
        return self._scaled(q_THC), k_TKC, v_TKC

    def _scaled(self, q_THC: Tensor) -> Tensor:
        """Queries for Attend and CrossAttend, which divide scores by sqrt(head_dim)."""
        return q_THC if self._q_factor == 1.0 else q_THC * self._q_factor


def _activated(operation: Operation, x_TX: Tensor) -> Tensor:
    if operation.activation is None:
        return x_TX
    activation = ACTIVATIONS[operation.activation]
    if not operation.gated:
        return activation(x_TX)
    gate_TF, up_TF = x_TX.chunk(2, dim=-1)
    return activation(gate_TF) * up_TF
