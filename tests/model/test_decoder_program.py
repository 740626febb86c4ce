"""Costs of operations, against counts of the whole model."""

from __future__ import annotations

import math

import pytest

from model.config import Experts, LayerKind, Rope
from model.decoder_program import Kind, cost, decoder_program, encoder_program
from model.nn.transformer import Decoder
from model.parameter_shapes import count_parameters, parameter_shapes
from tests.support.model.tiny_models import tiny_config


@pytest.mark.parametrize("tied", [True, False])
def test_costs_add_up_to_the_model(tied: bool) -> None:
    config = tiny_config(tied_head=tied, head_bias=True, qkv_bias=True)
    costs = {op: cost(config, op, 10) for op in decoder_program(config)}
    looked_up = 0 if tied else config.vocab_size * config.width
    assert sum(c.parameters for op, c in costs.items() if op.kind != Kind.EMBED) == count_parameters(config) - looked_up
    products = (op.weights[0].shape for op in costs if op.kind in (Kind.LINEAR, Kind.HEAD))
    attention = 4 * 10 * config.n_heads * config.head_dim * config.n_layers
    assert sum(c.flops for c in costs.values()) == 2 * sum(map(math.prod, products)) + attention
    assert sum(c.cached for c in costs.values()) == 10 * config.kv_elements_per_token


def test_experts_that_are_not_chosen_cost_nothing() -> None:
    kinds = (LayerKind(rope=Rope(), mlp="experts"), LayerKind(rope=Rope()))
    experts = Experts(count=8, chosen=2, width=24, bias=True, router_bias=True, shared_width=16)
    config = tiny_config(n_layers=2, layer_kinds=kinds, layer_types=(0, 1), experts=experts)
    operations = decoder_program(config)
    costs = [cost(config, op, 10) for op in operations if op.kind == Kind.EXPERTS]
    of_one = 3 * 24 * config.width
    assert [(each.parameters, each.flops) for each in costs] == [(2 * (of_one + 2 * 24 + config.width), 4 * of_one)]
    assert [cost(config, op, 10).parameters for op in operations if op.kind == Kind.ROUTE] == [8 * config.width + 8]
    assert {*Decoder(config).state_dict()} == parameter_shapes(config).keys()
    kept = [op.weights[0].name for op in operations if "mlp.shared" in op.module]
    assert kept == ["blocks.0.mlp.shared.up.weight", "blocks.0.mlp.shared.down.weight"]


def test_a_window_limits_what_attention_reads() -> None:
    kinds = (LayerKind(window=4, rope=Rope()), LayerKind(rope=Rope()))
    config = tiny_config(n_layers=2, layer_kinds=kinds, layer_types=(0, 1))
    windowed, full = (cost(config, op, 10) for op in decoder_program(config) if op.kind == Kind.ATTENTION)
    assert (windowed.cached * 10, windowed.flops * 10) == (full.cached * 4, full.flops * 4)


def test_encoder_may_be_deeper_than_the_decoder() -> None:
    config = tiny_config(n_encoder_layers=5, n_layers=1)
    assert {*Decoder(config).state_dict()} == parameter_shapes(config).keys()


def test_an_encoder_has_operations_of_its_own_only_where_there_is_one() -> None:
    assert encoder_program(tiny_config()) == []
    config = tiny_config(n_encoder_layers=3)
    assert [op.layer for op in encoder_program(config) if op.kind == Kind.ATTENTION] == [0, 1, 2]
    assert [op.layer for op in decoder_program(config) if op.kind == Kind.CROSS_ATTENTION] == [0, 1]
