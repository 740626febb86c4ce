"""Names and shapes of a decoder's parameters, from its list of operations."""

from __future__ import annotations

import math

from model.config import ModelConfig
from model.decoder_program import decoder_program, encoder_program

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
