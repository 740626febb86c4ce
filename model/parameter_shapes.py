"""Names and shapes of a decoder's parameters, from its list of operations."""

from __future__ import annotations

import math

from model.config import ModelConfig
from model.decoder_program import Kind, decoder_program, encoder_program

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Shapes of `Decoder(config).state_dict()` (model/nn/transformer.py), in the order of the computation."""
    operations = [*encoder_program(config), *decoder_program(config)]
    return {
        weight.name: weight.shape for operation in operations for weight in (*operation.weights, *operation.parameters)
    }


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters; a tied head counts once."""
    return sum(map(math.prod, parameter_shapes(config).values()))


def count_expert_parameters(config: ModelConfig) -> int:
    """Number of parameters of all experts, without routers and shared experts."""
    stored = [op.weights for op in decoder_program(config) if op.kind == Kind.EXPERTS]
    return sum(math.prod(weight.shape) for weights in stored for weight in weights)


def count_active_parameters(config: ModelConfig) -> int:
    """Number of parameters without the experts that a token does not choose."""
    if not (experts := config.experts):
        return count_parameters(config)
    of_one = count_expert_parameters(config) // experts.count
    return count_parameters(config) - (experts.count - experts.chosen) * of_one
