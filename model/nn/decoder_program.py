"""The operations of a decoder's blocks, in the order of Block.forward, with their weights by reference.

Backends run the list (app/engine/gpu/decoder.py) or pack it for their kernels (app/engine/cpu/program.py).
Cross-attention and the encoder run in torch alone (model/nn/transformer.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

from model.nn.transformer import Block, Decoder


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
    """An operation, and the module with its weights."""

    kind: Kind
    source: Register
    target: Register
    module: Any = None


def decoder_program(decoder: Decoder) -> Iterator[BlockOperation]:
    """The operations between the embedding and the final norm."""
    assert not decoder.config.n_encoder_layers, "torch runs models with an encoder"
    for block in decoder.blocks:
        assert isinstance(block, Block)
        yield from _block(block)


def _block(block: Block) -> Iterator[BlockOperation]:
    attention, mlp, is_post = block.attention, block.mlp, block.post_norm
    stream, normed, parallel_normed = Register.RESIDUAL, Register.NORMED, Register.PARALLEL_NORMED
    if block.parallel:
        yield BlockOperation(Kind.NORM, stream, parallel_normed, block.norm_mlp)
    yield BlockOperation(Kind.NORM, stream, normed, None if is_post else block.norm_attention)
    yield BlockOperation(Kind.LINEAR, normed, Register.QKV, attention.qkv)
    yield BlockOperation(Kind.ROPE_CACHE, Register.QKV, Register.QUERIES, attention)
    yield BlockOperation(Kind.ATTENTION, Register.QUERIES, normed, attention)
    yield BlockOperation(Kind.LINEAR if attention.out else Kind.ADD, normed, stream, attention.out)
    if is_post:
        yield BlockOperation(Kind.NORM, stream, stream, block.norm_attention)
    if mlp is None:
        return
    if not block.parallel:
        yield BlockOperation(Kind.NORM, stream, normed, None if is_post else block.norm_mlp)
    yield BlockOperation(Kind.LINEAR, parallel_normed if block.parallel else normed, Register.HIDDEN, mlp.up)
    yield BlockOperation(Kind.LINEAR, Register.HIDDEN, stream, mlp.down)
    if is_post:
        yield BlockOperation(Kind.NORM, stream, stream, block.norm_mlp)
