"""Runs a decoder's list of operations (model/decoder_program.py) in torch.

Shape legend: T tokens of the step, D width, H query heads, K kv heads, N = H + K, C head_dim, F mlp_width, X any width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from model.decoder_program import Kind, Operation, Register, decoder_program, is_read_again
from model.nn.attention import Attend, CrossAttend
from model.nn.layers import make_norm
from model.nn.transformer import Decoder


class Interpreter:
    """Computes the hidden states of a decoder, with the bits of Decoder.forward."""

    def __init__(self, decoder: Decoder) -> None:
        """The modules are looked up once: quantize them before."""
        config = decoder.config
        self._decoder, self._config = decoder, config
        modules: dict[str, Any] = {**dict(decoder.named_modules()), "": None}  # which calls the decoder itself ""
        operations = [each for each in decoder_program(config) if each.kind not in (Kind.EMBED, Kind.HEAD)]
        self._operations: list[tuple[Operation, Any, Any, bool]] = [
            (
                operation,
                modules[operation.module],
                modules.get(operation.module.rpartition(".")[0]),
                is_read_again(operation.source, operations[index + 1 :]),
            )
            for index, operation in enumerate(operations)
        ]
        self._layers: list[Any] = [(block.attention, block.rope) for block in decoder.blocks]
        self._unweighted = make_norm(config) if not config.norm_weight else None

    def __call__(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        cross: CrossAttend | None = None,
        *,
        n_rows: int | None = None,
    ) -> Tensor:
        """See Decoder.forward. n_rows: how many rows come before padding, which chooses no experts."""
        x_TD, factors = self._decoder.embed(tokens_T, positions_T)
        values: dict[Register, Any] = {Register.RESIDUAL: x_TD}
        for operation, module, parent, is_kept in self._operations:
            source, target, layer = operation.source, operation.target, operation.layer
            value = values[source] if is_kept else values.pop(source)
            match operation.kind:
                case Kind.NORM:
                    norm = module or (self._unweighted if operation.norm != "none" else None)
                    result = norm(value) if norm else value
                case Kind.ROUTE:
                    result = parent.route(value[:n_rows])
                case Kind.LINEAR | Kind.EXPERTS:
                    is_linear = operation.kind == Kind.LINEAR
                    result = module(value) if is_linear else module(value, values.pop(Register.ROUTES))
                    if is_linear and operation.activation:
                        result = parent.activated(result)
                    if operation.factor != 1.0:
                        result = result * operation.factor
                case Kind.ROPE_CACHE:
                    attention, rope = self._layers[layer]
                    result = attention.split_heads(value, factors.rotations[rope], factors.query_scale_T11)
                case Kind.ATTENTION:
                    q_THC, k_TKC, v_TKC = value
                    result = attend(layer, q_THC, k_TKC, v_TKC, self._layers[layer][0].sinks).flatten(1)
                case Kind.CROSS_ATTENTION:
                    assert cross is not None, "a decoder with an encoder needs a source"
                    result = cross(layer, self._scaled(value.view(len(value), -1, self._config.head_dim))).flatten(1)
                case Kind.ADD:
                    result = value
            values[target] = values[target] + result if operation.accumulates else result
        hidden_TD: Tensor = values[Register.OUTPUT]
        return hidden_TD

    def _scaled(self, q_THC: Tensor) -> Tensor:
        """Queries for CrossAttend, which divides scores by sqrt(head_dim)."""
        factor = self._config.q_factor
        return q_THC if factor == 1.0 else q_THC * factor
