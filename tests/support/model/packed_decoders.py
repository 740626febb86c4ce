"""Tiny decoders whose matrices are packed, in memory, and the same numbers as dense matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.shapes import parameter_reader
from model.config import Experts, LayerKind, ModelConfig, Rope
from model.number_formats import Array
from model.packed_matrix import PackedFormat, PackedMatrix
from model.parameter_shapes import parameter_shapes
from tests.support.model.packed_matrices import FORMATS, random_packed
from tests.support.model.tiny_models import GPT2, tiny_config, tiny_decoder

_HEAD_DIMS = {16: 20, 32: 24, 64: 48, 128: 32}
"""By group: rows of 4 heads are whole groups; with 64 and 128, q, k and v begin with panels."""
KINDS = ("llama", "gpt2", "experts")


def packed_config(kind: str, group: int) -> ModelConfig:
    """Sizes in whole groups, few of them multiples of 256; one of KINDS.

    llama: gated, tied head. gpt2: biases, untied head. experts: gated, with biases.
    """
    sizes: dict[str, Any] = {"width": 3 * group, "head_dim": _HEAD_DIMS[group], "vocab_size": 99, "context": 128}
    if kind == "llama":
        return tiny_config(**sizes, mlp_width=256 + group, residual_scale=0.4)
    if kind == "gpt2":
        return tiny_config(**{**GPT2, **sizes}, mlp_width=256 + group, tied_head=False, head_bias=True)
    experts = Experts(count=5, chosen=2, width=group, shared_width=2 * group, bias=True)
    layers = (LayerKind(rope=Rope(), mlp="experts"),)
    return tiny_config(**sizes, mlp_width=0, layer_kinds=layers, experts=experts, activation="swiglu_clamped")


class PackedState:
    """Random parameters of a decoder: matrices in one format, values of attention and one layer's mlp in another."""

    def __init__(self, config: ModelConfig, packed_format: PackedFormat) -> None:
        """Routers and tables of positions are dense."""
        self.config, self.reads = config, list[str]()
        dense = tiny_decoder(config)
        self._dense = {dtype: parameter_reader(dense.to(getattr(torch, dtype))) for dtype in ("bfloat16", "float32")}
        self._dense["float32"] = parameter_reader(tiny_decoder(config))
        self.parts: dict[str, tuple[PackedMatrix, ...]] = {}
        other = next(each for each in FORMATS[::-1] if each.group == packed_format.group and each != packed_format)
        for seed, (name, shape) in enumerate(parameter_shapes(config).items()):
            if len(shape) < 2 or "router" in name or "position" in name or name.endswith("bias"):
                continue
            *_, rows, columns = shape
            rows = int(np.prod(shape[:-1]))
            formats = [(packed_format, rows)]
            if name.endswith("qkv.weight"):
                of_queries, of_keys = (heads * config.head_dim for heads in (config.n_heads, config.n_kv_heads))
                formats = [(packed_format, of_queries), (packed_format, of_keys), (other, of_keys)]
            self.parts[name] = tuple(
                random_packed(each, rows=size, columns=columns, seed=10 * seed + index)
                for index, (each, size) in enumerate(formats)
            )

    def packed_formats(self, name: str) -> tuple[tuple[PackedFormat, int], ...]:
        """See PackedWeights."""
        return tuple((part.format, part.shape[0]) for part in self.parts.get(name, ()))

    def read_packed(self, name: str) -> tuple[PackedMatrix, ...]:
        """See PackedWeights."""
        self.reads.append(name)
        return self.parts[name]

    def read(self, name: str, dtype: str) -> Array:
        """A dense parameter."""
        assert name not in self.parts, "packed parameters are not dequantized"
        self.reads.append(name)
        return self._dense[dtype](name, dtype)

    def dequantized(self, name: str, dtype: str) -> Array:
        """Any parameter as dense numbers."""
        if name not in self.parts:
            return self._dense[dtype](name, dtype)
        numbers = np.concatenate([part.dequantized(dtype) for part in self.parts[name]])
        return numbers.reshape(parameter_shapes(self.config)[name])

    def change_a_scale(self, name: str) -> None:
        """Makes the last scale of a parameter wrong."""
        *before, last = self.parts[name]
        values = last.scales.values.copy()
        values[-1, -1] = values[-1, -1] // 2 if last.scales.units is not None else values[-1, -1] / 2
        self.parts[name] = (*before, replace(last, scales=replace(last.scales, values=values)))
