"""Names and shapes of parameters equal the network's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from app.cli.check import context_bytes
from model.checkpoint.model_summary import memory_lines, shape_lines
from model.decoder_program import decoder_program
from model.nn.transformer import Decoder
from model.parameter_shapes import count_active_parameters, count_parameters, parameter_shapes
from tests.support.model.tiny_models import mixture_config, tiny_config

KINDS: list[dict[str, Any]] = [
    {},
    {"norm": "layernorm", "norm_bias": True, "positions": "learned", "gated": False, "qkv_bias": True,
     "out_bias": True, "mlp_bias": True, "tied_head": False, "head_bias": True},
    {"norm": "layernorm", "norm_bias": True, "parallel_residual": True, "qk_norm": "head"},
    {"norm": "none", "final_norm": False, "positions": "sinusoidal", "mlp_width": 0, "out_projection": False},
    {"norm": "layernorm", "norm_position": "post", "final_norm": False, "mlp_width": 0},
    {"n_encoder_layers": 2, "norm": "layernorm", "norm_bias": True, "qkv_bias": True, "out_bias": True},
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_parameter_shapes_and_operations_match_the_decoder(kind: dict[str, Any]) -> None:
    config = tiny_config(**kind)
    with torch.device("meta"):
        decoder = Decoder(config)
    assert parameter_shapes(config) == {name: tuple(tensor.shape) for name, tensor in decoder.state_dict().items()}
    assert count_parameters(config) == decoder.n_params
    modules = dict(decoder.named_modules())
    assert {operation.module for operation in decoder_program(config)} <= modules.keys()


def test_active_parameters_are_those_without_the_experts_that_a_token_does_not_choose() -> None:
    config = mixture_config(bias=True, shared_width=8)
    assert config.experts
    of_one = sum(each[0].numel() for name, each in Decoder(config).state_dict().items() if ".mlp.experts." in name)
    assert count_parameters(config) - count_active_parameters(config) == 9 * of_one > 0
    lines = dict(memory_lines(config, count_parameters(config), context_bytes(config)))
    assert lines["parameters"].endswith(" active for a token")
    whole = replace(config, experts=replace(config.experts, chosen=12))
    assert count_active_parameters(whole) == count_parameters(whole)
    assert count_active_parameters(tiny_config()) == count_parameters(tiny_config())
    described = dict(shape_lines(config))
    assert described["feed-forward"] == "3 of 12 experts of 24, 8 that all tokens share, weights by softmax"
    assert described["layers"].endswith(", experts") and "experts" not in described["switches"]
