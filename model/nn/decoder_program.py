"""The operations of a decoder's blocks, in the order of Block.forward, with the names of the modules of their weights.

Backends run the list (app/engine/gpu/decoder.py) or pack it for their kernels (app/engine/cpu/program.py).
Cross-attention and the encoder run in torch alone (model/nn/transformer.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from model.config import ModelConfig


class Kind(IntEnum):
    """Kind of an operation."""

    NORM = 0
    """Norm of the residual stream; without a module a copy."""
    LINEAR = 1
    """Matrix product, added to the target if that is the residual stream. The activation follows if it is HIDDEN."""
    ROPE_CACHE = 2
    """Norms and rotates queries and keys, and writes keys and values to the cache."""
    ATTENTION = 3
    ADD = 4


class Register(IntEnum):
    """Buffer that an operation reads or writes."""

    RESIDUAL = 0
    QKV = 1
    NORMED = 2
    HIDDEN = 3
    QUERIES = 4
    PARALLEL_NORMED = 5


class BlockOperation(NamedTuple):
    """An operation of a block, and the module with its weights."""

    kind: Kind
    source: Register
    target: Register
    module: str = ""
    """Name of the module in a Decoder; empty if there is none."""
    layer: int = 0


def decoder_program(config: ModelConfig) -> Iterator[BlockOperation]:
    """The operations between the embedding and the final norm."""
    assert not config.n_encoder_layers, "torch runs models with an encoder"
    for layer in range(config.n_layers):
        yield from (operation._replace(layer=layer) for operation in _block(config, f"blocks.{layer}"))


def _block(config: ModelConfig, name: str) -> Iterator[BlockOperation]:
    is_post, is_parallel = config.norm_position == "post", config.parallel_residual
    stream, normed, parallel_normed = Register.RESIDUAL, Register.NORMED, Register.PARALLEL_NORMED
    norm_attention, attention, norm_mlp = f"{name}.norm_attention", f"{name}.attention", f"{name}.norm_mlp"
    out = f"{attention}.out" if config.out_projection else ""
    if is_parallel:
        yield BlockOperation(Kind.NORM, stream, parallel_normed, norm_mlp)
    yield BlockOperation(Kind.NORM, stream, normed, "" if is_post else norm_attention)
    yield BlockOperation(Kind.LINEAR, normed, Register.QKV, f"{attention}.qkv")
    yield BlockOperation(Kind.ROPE_CACHE, Register.QKV, Register.QUERIES, attention)
    yield BlockOperation(Kind.ATTENTION, Register.QUERIES, normed, attention)
    yield BlockOperation(Kind.LINEAR if out else Kind.ADD, normed, stream, out)
    if is_post:
        yield BlockOperation(Kind.NORM, stream, stream, norm_attention)
    if not config.mlp_width:
        return
    if not is_parallel:
        yield BlockOperation(Kind.NORM, stream, normed, "" if is_post else norm_mlp)
    yield BlockOperation(Kind.LINEAR, parallel_normed if is_parallel else normed, Register.HIDDEN, f"{name}.mlp.up")
    yield BlockOperation(Kind.LINEAR, Register.HIDDEN, stream, f"{name}.mlp.down")
    if is_post:
        yield BlockOperation(Kind.NORM, stream, stream, norm_mlp)
