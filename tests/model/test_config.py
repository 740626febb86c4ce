"""ModelConfig: every rule has a shape that breaks it, and every sentence names what to change."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from model.config import ConfigError, ModelConfig, RopeScaling
from tests.support.model.tiny_models import tiny_config

WHOLE = ("vocab_size", "width", "n_layers", "n_heads", "n_kv_heads", "head_dim", "context")
NOT_WHOLE = (0, 1.0, "4", None, True, 2**31)
CHOICES = ("norm", "norm_position", "positions", "activation", "attention_scale")
SWITCHES = [field.name for field in fields(ModelConfig) if field.type == "bool"]
NUMBERS = ("norm_eps", "rope_theta", "embedding_scale")
NOT_POSITIVE = (0, math.nan, math.inf, 10**400, "1", True)
PLAIN = {"norm": "none", "final_norm": False, "positions": "none"}
RULES: list[tuple[dict[str, Any], str]] = [
    *[({name: value}, f"{name} must be a whole number") for name in WHOLE for value in NOT_WHOLE],
    *[
        ({name: value}, f"{name} must be a wh")
        for name in ("mlp_width", "n_encoder_layers")
        for value in (-1, 1.5, None)
    ],
    *[({name: value}, f"{name} must be one of") for name in CHOICES for value in ("surprise", None, 1, ["pre"])],
    *[({name: value}, f"{name} must be true or false") for name in SWITCHES for value in (0, 1, "true", None)],
    *[({name: value}, f"{name} must be a number above 0") for name in NUMBERS for value in (*NOT_POSITIVE, None)],
    *[({"logit_soft_cap": value}, "logit_soft_cap must be above 0 or null") for value in NOT_POSITIVE],
    *[({"sliding_window": value}, "sliding_window must be at least 1") for value in (0, -1, 2.0, "9", True)],
    *[({"rotary_dim": value}, "rotary_dim must be at least 2") for value in (0, 1, -2, 4.0, "4", True)],
    *[
        ({"rope_scaling": value}, "rope_scaling must be")
        for value in ("linear", 2.0, {"kind": "linear", "factor": 2.0})
    ],
    ({"n_kv_heads": 3}, r"n_heads \(4\) must be a multiple of n_kv_heads \(3\)"),
    ({"n_kv_heads": 8}, "multiple"),
    ({"head_dim": 15}, r"at most head_dim \(15\), not 15"),
    ({"rotary_dim": 5}, "must be even"),
    ({"rotary_dim": 18}, r"at most head_dim \(16\), not 18"),
    ({"positions": "learned", "rotary_dim": 4}, "need rotary positions, not learned"),
    ({"positions": "none", "rope_scaling": RopeScaling(kind="linear", factor=2.0)}, "need rotary positions, not none"),
    ({"norm": "none"}, "need a norm, not norm none"),
    ({"norm": "none", "final_norm": False, "norm_position": "post"}, "need a norm, not norm none"),
    ({"norm_bias": True}, "norm_bias needs layernorm, not rmsnorm"),
    ({**PLAIN, "norm_bias": True}, "norm_bias needs layernorm, not none"),
    ({"mlp_width": 0, "mlp_bias": True}, "mlp_bias needs a feed-forward"),
    ({"mlp_width": 0, "parallel_residual": True}, "parallel_residual needs"),
    ({"norm_position": "post", "parallel_residual": True}, "parallel_residual needs"),
    ({"out_projection": False, "head_dim": 18}, r"4 heads of 18 must add up to the width \(64\)"),
    ({"out_projection": False, "out_bias": True}, "without bias"),
    ({"n_encoder_layers": 1, "parallel_residual": True}, "an encoder supports neither"),
    ({"n_encoder_layers": 1, "sliding_window": 8}, "an encoder supports neither"),
]


@pytest.mark.parametrize(("change", "words"), RULES)
def test_impossible_shapes_are_refused_in_one_sentence(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        tiny_config(**change)
    assert "\n" not in str(caught.value)


POSSIBLE: list[dict[str, Any]] = [
    {},
    {"n_kv_heads": 1, "head_dim": 2, "rotary_dim": 2, "sliding_window": 1, "logit_soft_cap": 30, "norm_eps": 1},
    {"positions": "none", "head_dim": 15, "mlp_width": 0, "norm_position": "post", "final_norm": False},
    {**PLAIN, "out_projection": False, "n_layers": 1, "context": 1, "vocab_size": 1},
    {"norm": "layernorm", "norm_bias": True, "parallel_residual": True, "rope_scaling": None, "sliding_window": None},
    {"n_encoder_layers": 2, "norm_position": "post", "rope_scaling": RopeScaling(kind="llama3", factor=2)},
]


@pytest.mark.parametrize("change", POSSIBLE)
def test_what_is_at_the_edge_of_a_rule_is_allowed(change: dict[str, Any]) -> None:
    config = tiny_config(**change)
    assert {name: getattr(config, name) for name in change} == change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "yarn"}, "'yarn' is not one of linear, llama3"),
        ({"kind": None}, "None is not one of"),
        *[({"factor": value}, "factor of the rope scaling must be above 0") for value in (*NOT_POSITIVE, None)],
        ({"low_freq_factor": 0}, "low_freq_factor"),
        ({"high_freq_factor": "4"}, "high_freq_factor"),
        ({"original_context": -8192}, "original_context"),
        ({"low_freq_factor": 4.0}, "must be below high_freq_factor"),
    ],
)
def test_impossible_rope_scalings_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RopeScaling(**{"kind": "llama3", "factor": 8.0, **change})


def test_the_derived_numbers() -> None:
    assert tiny_config(rotary_dim=4).effective_rotary_dim == 4
    assert tiny_config().effective_rotary_dim == 16
    assert tiny_config().kv_elements_per_token == 2 * 2 * 2 * 16
