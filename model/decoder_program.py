"""The operations of a decoder in the order of its computation, with their registers, weights, shapes and costs.

This list describes a decoder once. Parameter shapes (model/parameter_shapes.py) and costs come from it, torch
interprets it (model/nn/interpreter.py), app/engine/cpu/packed_decoder.py packs it for the C++ kernels, and
app/engine/gpu/decoder.py runs it with Triton's. Training differentiates Block.forward (model/nn/transformer.py),
the second description; tests/model/nn/test_interpreter.py holds both equal.

    tokens -EMBED-> residual -blocks-> residual -NORM-> output -HEAD-> logits

A block of a pre-norm decoder (`+` accumulates into the target):

    residual -NORM-> normed -LINEAR-> qkv -ROPE_CACHE-> queries -ATTENTION-> normed -LINEAR-> + residual
    residual -NORM-> normed -LINEAR, activation-> hidden -LINEAR-> + residual

Where a norm precedes the addition, the last product of each line goes to a branch: -LINEAR-> branch -NORM-> + residual.
In a layer with experts the second line is

    residual -NORM-> normed -ROUTE-> routes
    normed, routes -EXPERTS-> + residual
    normed -LINEAR, activation-> hidden -LINEAR-> + residual    (the shared expert, if there is one)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from model.config import Activation, ModelConfig, Norm


class Kind(IntEnum):
    """Kind of an operation."""

    NORM = 0
    """Norm of each row; a copy if the norm is none."""
    LINEAR = 1
    """Product with the first weight, plus the second one, then the activation."""
    ROPE_CACHE = 2
    """Norms and rotates queries and keys, scales queries, and writes keys and values to the cache."""
    ATTENTION = 3
    """Attention of the layer's queries over its cache."""
    ADD = 4
    """Adds the source to the target."""
    CROSS_ATTENTION = 5
    """Attention over the encoder's output; the weights compute keys and values once for each source."""
    EMBED = 6
    """Rows of the first weight, one for each token, plus rows of the second one, one for each position."""
    HEAD = 7
    """LINEAR from hidden states to logits, of the rows that are sampled or scored."""
    ROUTE = 8
    """Chooses the experts of each row, in the order of their ids, and computes their weights, both in float32.

    Weights: the router's matrix, then its bias (router_bias), then the bias of the choice (choice_bias).
    """
    EXPERTS = 9
    """Weighted sum of each row's experts in the order of ROUTES, in float32: down(activation(up(source))).

    Weights, with a leading axis for experts: up, which has the rows of gate before those of up, and down, then their
    biases (Experts.bias). Those of experts that no row of the step has chosen are not read.
    """


class Register(IntEnum):
    """Buffer that an operation reads or writes; it has one row for each token of the step."""

    RESIDUAL = 0
    QKV = 1
    NORMED = 2
    HIDDEN = 3
    QUERIES = 4
    PARALLEL_NORMED = 5
    BRANCH = 6
    """What a norm turns into an addition to the residual stream."""
    TOKENS = 7
    OUTPUT = 8
    """Hidden states after the final norm."""
    LOGITS = 9
    ROUTES = 10
    """Ids and weights of the experts of each row, which EXPERTS reads besides its source."""


class Weight(NamedTuple):
    """A parameter by its name in the state dict of a Decoder."""

    name: str
    shape: tuple[int, ...]


class Operation(NamedTuple):
    """One operation of a decoder."""

    kind: Kind
    source: Register
    target: Register
    weights: tuple[Weight, ...] = ()
    layer: int = 0
    """Index of the block, which decides about cache, window and rotation."""
    accumulates: bool = False
    """Whether the result is added to the target."""
    activation: Activation | None = None
    """Applied to the result."""
    gated: bool = False
    """Whether the result is activation(first half) * second half."""
    parameters: tuple[Weight, ...] = ()
    """Of the activation: see ACTIVATION_PARAMETERS."""
    norm: Norm = "none"
    """Of NORM."""
    factor: float = 1.0
    """Of what LINEAR or EXPERTS adds to the residual stream, or writes to a branch."""

    @property
    def module(self) -> str:
        """Name of the Decoder's module that holds the weights; empty if it has none."""
        return self.weights[0].name.rpartition(".")[0] if self.weights else ""


ACTIVATION_PARAMETERS: dict[Activation, int] = {"xielu": 2}
"""Activations with parameters, and how many numbers they have in each layer."""


class Cost(NamedTuple):
    """What an operation costs for one row; bytes depend on number formats, which the caller knows."""

    parameters: int
    """Numbers of the weights that the row needs, which one step reads once: of the chosen experts only."""
    flops: int
    """Floating-point operations of products, two for each multiplication and addition."""
    cached: int
    """Numbers of the cache that attention reads."""
    numbers: int
    """Numbers that an operation without products writes."""


def decoder_program(config: ModelConfig) -> list[Operation]:
    """All operations of a decoder."""
    embedding, width = Weight("embedding", (config.vocab_size, config.width)), config.width
    positions = (Weight("position_embedding", (config.context, width)),) if config.positions == "learned" else ()
    matrix = embedding if config.tied_head else Weight("untied_head", embedding.shape)
    bias = (Weight("head_bias", (config.vocab_size,)),) if config.head_bias else ()
    stream, output = Register.RESIDUAL, Register.OUTPUT
    return [
        Operation(Kind.EMBED, Register.TOKENS, stream, (embedding, *positions)),
        *([_norm(config, "embedding_norm", stream, stream)] if config.embedding_norm else []),
        *_blocks(config, "blocks", config.n_layers, cross=config.n_encoder_layers > 0),
        _norm(config, "norm", stream, output) if config.final_norm else Operation(Kind.NORM, stream, output),
        Operation(Kind.HEAD, output, Register.LOGITS, (matrix, *bias)),
    ]


def encoder_program(config: ModelConfig) -> list[Operation]:
    """The operations that an encoder has of its own, after the embedding, which it shares with the decoder."""
    if not config.n_encoder_layers:
        return []
    stream, output = Register.RESIDUAL, Register.OUTPUT
    return [
        *_blocks(config, "encoder_blocks", config.n_encoder_layers),
        _norm(config, "encoder_norm", stream, output) if config.final_norm else Operation(Kind.NORM, stream, output),
    ]


def _norm(config: ModelConfig, name: str, source: Register, target: Register) -> Operation:
    """A norm over the width; `norm` none copies."""
    names = ("weight", "bias") if config.norm_bias else ("weight",)
    has_weights = config.norm != "none" and config.norm_weight
    weights = tuple(Weight(f"{name}.{each}", (config.width,)) for each in names) if has_weights else ()
    return Operation(Kind.NORM, source, target, weights, norm=config.norm)


def is_read_again(register: Register, operations: list[Operation]) -> bool:
    """Whether one of these operations reads the register before one overwrites it."""
    for operation in operations:
        if operation.source == register or (operation.target == register and operation.accumulates):
            return True
        if operation.target == register:
            return False
    return False


def cost(config: ModelConfig, operation: Operation, context: float) -> Cost:
    """Cost of one row at `context` tokens, which ATTENTION reads as far as the layer's window reaches."""
    parameters = sum(math.prod(weight.shape) for weight in operation.weights)
    heads, kv_heads = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    match operation.kind:
        case Kind.LINEAR | Kind.HEAD | Kind.ROUTE:
            return Cost(parameters, 2 * math.prod(operation.weights[0].shape), 0, 0)
        case Kind.EXPERTS:
            assert config.experts
            of_one = [math.prod(weight.shape[1:]) for weight in operation.weights]
            return Cost(config.experts.chosen * sum(of_one), 2 * config.experts.chosen * sum(of_one[:2]), 0, 0)
        case Kind.ATTENTION | Kind.CROSS_ATTENTION:
            window = config.layer_kind(operation.layer).window if operation.kind == Kind.ATTENTION else None
            keys = context if window is None else min(context, window)
            return Cost(parameters, int(4 * heads * keys), int(2 * kv_heads * keys), 0)
        case Kind.ROPE_CACHE:
            return Cost(parameters, 0, 0, heads + 2 * kv_heads)
        case Kind.EMBED:  # it reads one row of each weight
            return Cost(len(operation.weights) * config.width, 0, 0, config.width)
    return Cost(parameters, 0, 0, config.width)


def _blocks(config: ModelConfig, name: str, count: int, *, cross: bool = False) -> Iterator[Operation]:
    for layer in range(count):
        block = _block(config, f"{name}.{layer}", config.layer_kind(layer).mlp, cross=cross)
        yield from (operation._replace(layer=layer) for operation in block)


def _block(config: ModelConfig, name: str, mlp: str, *, cross: bool) -> Iterator[Operation]:
    is_parallel = config.parallel_residual
    residual, normed, attention = Register.RESIDUAL, Register.NORMED, f"{name}.attention"
    heads, kv_heads = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim

    def before(norm: str, target: Register = normed) -> Operation:
        if not config.has_norm_before:
            return Operation(Kind.NORM, residual, target)
        return _norm(config, f"{name}.{norm}", residual, target)

    def after(norm: str) -> Iterator[Operation]:
        """What follows a product whose result is added."""
        if config.has_norm_of_output:
            yield _norm(config, f"{name}.{norm}_output", Register.BRANCH, residual)._replace(accumulates=True)
        elif config.norm_position == "post":
            yield _norm(config, f"{name}.{norm}", residual, residual)

    yield before("norm_attention")
    if is_parallel:
        yield before("norm_attention" if config.shared_norm else "norm_mlp", Register.PARALLEL_NORMED)
    qkv_rows = heads + 2 * kv_heads
    yield _linear(f"{attention}.qkv", normed, Register.QKV, qkv_rows, config.width, bias=config.qkv_bias)
    yield Operation(Kind.ROPE_CACHE, Register.QKV, Register.QUERIES, _head_norms(config, attention))
    sinks = (Weight(f"{attention}.sinks", (config.n_heads,)),) if config.sinks else ()
    yield Operation(Kind.ATTENTION, Register.QUERIES, normed, sinks)
    yield _out(config, attention)
    yield from after("norm_attention")
    if cross:
        yield before("norm_cross")
        yield _linear(f"{name}.cross.q", normed, Register.QKV, heads, config.width, bias=config.qkv_bias)
        keys = _linear(f"{name}.cross.kv", normed, normed, 2 * kv_heads, config.width, bias=config.qkv_bias)
        yield Operation(Kind.CROSS_ATTENTION, Register.QKV, normed, keys.weights)
        yield _out(config, f"{name}.cross")
        yield from after("norm_cross")
    if mlp == "experts":
        yield before("norm_mlp")
        yield from _mixture(config, f"{name}.mlp")
        yield from after("norm_mlp")
    elif config.mlp_width:
        if not is_parallel:
            yield before("norm_mlp")
        source = Register.PARALLEL_NORMED if is_parallel else normed
        yield from _feed_forward(config, f"{name}.mlp", source, config.mlp_width)
        yield from after("norm_mlp")


def _feed_forward(config: ModelConfig, name: str, source: Register, width: int) -> Iterator[Operation]:
    rows, bias = width * (1 + config.gated), config.mlp_bias
    up = _linear(f"{name}.up", source, Register.HIDDEN, rows, config.width, bias=bias)
    count = ACTIVATION_PARAMETERS.get(config.activation)
    parameters = (Weight(f"{name}.activation", (count,)),) if count else ()
    yield up._replace(activation=config.activation, gated=config.gated, parameters=parameters)
    yield _added(config, _linear(f"{name}.down", Register.HIDDEN, Register.RESIDUAL, config.width, width, bias))


def _mixture(config: ModelConfig, name: str) -> Iterator[Operation]:
    """The experts of a layer, and the shared expert, which every token passes."""
    experts, width = config.experts, config.width
    assert experts
    route = [Weight(f"{name}.router.weight", (experts.count, width))]
    route += [Weight(f"{name}.router.bias", (experts.count,))] if experts.router_bias else []
    route += [Weight(f"{name}.choice_bias", (experts.count,))] if experts.choice_bias else []
    yield Operation(Kind.ROUTE, Register.NORMED, Register.ROUTES, tuple(route))
    rows = experts.width * (1 + config.gated)
    weights = [Weight(f"{name}.experts.up", (experts.count, rows, width))]
    weights += [Weight(f"{name}.experts.down", (experts.count, width, experts.width))]
    if experts.bias:
        weights += [Weight(f"{name}.experts.up_bias", (experts.count, rows))]
        weights += [Weight(f"{name}.experts.down_bias", (experts.count, width))]
    computed = Operation(Kind.EXPERTS, Register.NORMED, Register.RESIDUAL, tuple(weights))
    yield _added(config, computed._replace(activation=config.activation, gated=config.gated))
    if experts.shared_width:
        yield from _feed_forward(config, f"{name}.shared", Register.NORMED, experts.shared_width)


def _head_norms(config: ModelConfig, attention: str) -> tuple[Weight, ...]:
    """Weights of the norms of queries and keys."""
    if config.qk_norm == "none" or not config.norm_weight:
        return ()
    names = zip(("q_norm", "k_norm"), config.head_norm_sizes, strict=True)
    return tuple(Weight(f"{attention}.{name}.weight", (size,)) for name, size in names)


def _added(config: ModelConfig, operation: Operation) -> Operation:
    """Adds the result to the residual stream, or writes it to the branch for the norm that will."""
    if config.has_norm_of_output:
        return operation._replace(target=Register.BRANCH)
    return operation._replace(target=Register.RESIDUAL, accumulates=True, factor=config.residual_scale)


def _out(config: ModelConfig, attention: str) -> Operation:
    """What attention computed, added to the residual stream."""
    if not config.out_projection:
        return Operation(Kind.ADD, Register.NORMED, Register.RESIDUAL, accumulates=True)
    rows, columns = config.width, config.n_heads * config.head_dim
    return _added(
        config, _linear(f"{attention}.out", Register.NORMED, Register.RESIDUAL, rows, columns, config.out_bias)
    )


def _linear(name: str, source: Register, target: Register, rows: int, columns: int, bias: bool) -> Operation:
    weights = (Weight(f"{name}.weight", (rows, columns)), Weight(f"{name}.bias", (rows,)))
    return Operation(Kind.LINEAR, source, target, weights if bias else weights[:1])
