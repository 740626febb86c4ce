"""Batch invariance for every switch of ModelConfig, and the oracle."""

from __future__ import annotations

import random
from functools import partial
from typing import get_args

import pytest
import torch

from app.common.types import Request, SamplingParams
from model.config import Activation, ExpertScore, NormPosition, QkNorm, RopeKind
from model.nn.layers import ACTIVATIONS, activate
from model.nn.reference import generate
from tests.support.engine.parity import expect_parity
from tests.support.model.random_configs import random_config
from tests.support.model.tiny_models import round_weights_for, run_all, tiny_decoder, tiny_engine

DTYPES = [torch.float32, torch.bfloat16]
SEEDS = range(3 * len(get_args(Activation)))
CODED = (1, 4, 6, 11, 15, 18)
"""Seeds of decoders for the int8 cache: among them experts, sinks and each kind of positions."""
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "way")]
one_way = pytest.mark.parametrize("way", ["torch"], indirect=True)
"""For what is not computed by an engine: it would be the same three times."""


def _requests(vocab: int, *, greedy: bool = False) -> list[Request]:
    """Prompts of many lengths, half of them with a common prefix."""
    rng = random.Random(vocab)
    common = [rng.randrange(vocab) for _ in range(35)]
    made = []
    for i in range(10):
        own = [rng.randrange(vocab) for _ in range(rng.choice([1, 9, 31, 70]))]
        params = SamplingParams(temperature=0.0 if greedy or i % 3 == 0 else 1.0, seed=i, logprobs=5)
        prompt = tuple(common + own if i % 2 else own)
        made.append(Request(id=f"r{i}", prompt=prompt, max_tokens=rng.randint(8, 22), params=params))
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_scheduling_does_not_change_a_bit(seed: int, dtype: torch.dtype) -> None:
    decoder = tiny_decoder(random_config(seed), seed=seed, dtype=dtype)
    outcomes = expect_parity(decoder, _requests(decoder.config.vocab_size), tight=9)
    tokens = [event.token for outcome in outcomes.values() for event in outcome.events]
    assert None not in tokens and len(set(tokens)) > 3, "too uniform to detect a difference"


@pytest.mark.usefixtures("int8_cache")
@pytest.mark.parametrize("seed", CODED)
def test_scheduling_does_not_change_a_bit_with_an_int8_cache(seed: int) -> None:
    decoder = tiny_decoder(random_config(seed), seed=seed, dtype=DTYPES[CODED.index(seed) % 2])
    expect_parity(decoder, _requests(decoder.config.vocab_size), tight=9)


@pytest.mark.parametrize("seed", SEEDS)
def test_engine_output_equals_that_of_the_oracle(seed: int, way: str) -> None:
    decoder = tiny_decoder(random_config(seed), seed=seed)
    round_weights_for(way, decoder)
    requests = _requests(decoder.config.vocab_size, greedy=True)
    events = run_all(tiny_engine(decoder, blocks=150, tokens_per_step=40), requests)
    for request in requests[:6]:
        expected = generate(decoder, list(request.prompt), request.max_tokens)
        assert [event.token for event in events[request.id]] == expected


@pytest.mark.usefixtures("int8_cache")
@pytest.mark.parametrize("seed", CODED)
def test_engine_output_equals_that_of_the_oracle_with_an_int8_cache(seed: int, way: str) -> None:
    decoder = tiny_decoder(random_config(seed), seed=seed)
    round_weights_for(way, decoder)
    requests = _requests(decoder.config.vocab_size, greedy=True)
    events = run_all(tiny_engine(decoder, blocks=150, tokens_per_step=40), requests)
    for request in requests[:4]:
        expected = generate(decoder, list(request.prompt), request.max_tokens, kv_cache="int8")
        assert [event.token for event in events[request.id]] == expected


@one_way
def test_random_decoders_cover_both_values_of_every_switch() -> None:
    configs = [random_config(seed) for seed in SEEDS]
    names = {"norm": 3, "positions": 3, "activation": len(get_args(Activation)), "head_dim": 5, "attention_scale": 3}
    names |= {"norm_position": len(get_args(NormPosition)), "qk_norm": len(get_args(QkNorm))}
    two = ("tied_head", "parallel_residual", "out_projection", "final_norm", "head_bias", "norm_bias", "gated")
    two += ("qkv_bias", "norm_offset", "norm_weight", "shared_norm", "qk_norm_after_rope", "embedding_norm")
    two += ("sinks", "residual_scale", "logit_scale", "query_scale", "logit_soft_cap", "attention_soft_cap")
    names |= dict.fromkeys(two, 2)
    assert {name: len({getattr(config, name) for config in configs}) for name in names} == names
    kinds = [kind for config in configs for kind in config.layer_kinds]
    assert {kind.window for kind in kinds} == {None, 9, 40}
    assert {rope.kind for kind in kinds if (rope := kind.rope)} == set(get_args(RopeKind))
    assert {kind.rope and kind.rope.dim for kind in kinds} == {None, 2}
    assert {len(config.layer_kinds) for config in configs} == {1, 2}
    assert any(len(config.ropes) == 2 for config in configs), "layers with different ropes"
    assert {config.mlp_width == 0 for config in configs} == {True, False}
    mixtures = [config.experts for config in configs if config.experts]
    assert {experts.score for experts in mixtures} == set(get_args(ExpertScore))
    switches = ("normalized", "factor", "router_bias", "choice_bias", "bias", "shared_width")
    assert all(len({getattr(experts, name) for experts in mixtures}) == 2 for name in switches)
    assert {len({kind.mlp for kind in config.layers}) for config in configs if config.experts} == {1, 2}


@one_way
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [33, 300, 1024])
@torch.inference_mode()
def test_activation_of_a_row_does_not_depend_on_its_position(width: int, dtype: torch.dtype, threads: int) -> None:
    """torch's own silu and gelu do not have this property (model/nn/layers.py)."""
    torch.set_num_threads(threads)
    x_TF = (2 * torch.randn(1000, 2 * width, generator=torch.Generator().manual_seed(width))).to(dtype)
    functions = ACTIVATIONS | {"xielu": partial(activate, "xielu", parameters=torch.tensor([0.2, -1.0]))}
    for name, function in functions.items():
        for whole_TF in (x_TF[:, :width].contiguous(), x_TF[:, :width]):
            fours = torch.cat([function(part) for part in whole_TF.split(4)])
            for rows in (8, 20, 100, 1000):
                assert torch.equal(function(whole_TF[:rows]), fours[:rows]), (name, rows)
