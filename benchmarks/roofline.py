"""Roofline model: the least time that a step of a decoder can take on a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import log

from model.config import ModelConfig

_BYTES = {"bf16": 2, "f32": 4, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Measured peaks of the machine: nothing that reads and multiplies can be faster."""

    read: Mapping[int, float]
    """Bytes per second, by the size of the buffer that is read repeatedly: small ones fit in a cache."""
    multiply: Mapping[str, float]
    """Operations (multiplications and additions) per second, by precision."""

    def bandwidth(self, size: float) -> float:
        """Interpolates linearly over the logarithm of the size."""
        sizes = sorted(self.read)
        if size <= sizes[0]:
            return self.read[sizes[0]]
        for below, above in pairwise(sizes):
            if size <= above:
                share = log(size / below) / log(above / below)
                return self.read[below] + share * (self.read[above] - self.read[below])
        return self.read[sizes[-1]]

    def least_seconds(self, work: Work) -> float:
        """The longer of the times to read and to multiply."""
        return max(work.bytes_read / self.bandwidth(work.bytes_read), work.operations / self.multiply[work.precision])


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The least work of one step."""

    bytes_read: float
    operations: float
    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Numbers that a model consists of."""

    body: int
    """Numbers in the matrices of all blocks."""
    head: int
    """Numbers in the output projection."""
    kv_per_token: int
    """Numbers that the KV cache keeps for one token, over all layers."""


def work_of(model: ModelSize, *, tokens: int, rows: int, kept: float, precision: str) -> Work:
    """Least work of a step that computes `tokens` tokens and samples for `rows` sequences with `kept` tokens each.

    The step reads all matrices once. Keys and values are bfloat16 with int8 weights. Operations leave out the products
    of attention, which are few compared with those of the matrices at the lengths measured here.
    """
    kv_bytes = 4 if precision == "f32" else 2
    return Work(
        bytes_read=(model.body + model.head) * _BYTES[precision] + rows * kept * model.kv_per_token * kv_bytes,
        operations=2.0 * (model.body * tokens + model.head * rows),
        precision=precision,
    )


def size_of(config: ModelConfig) -> ModelSize:
    """Size of a model; a step reads only single rows of an embedding that is not tied to the head."""
    heads, kv_heads = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    attention = config.width * (heads + 2 * kv_heads) + heads * config.width
    mlp = (3 if config.gated else 2) * config.width * config.mlp_width
    return ModelSize(
        body=config.n_layers * (attention + mlp),
        head=config.vocab_size * config.width,
        kv_per_token=config.kv_elements_per_token,
    )
