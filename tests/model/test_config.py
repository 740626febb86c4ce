"""ModelConfig: for every rule, a shape that breaks it and an error that names what to change."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from model.config import ConfigError, ModelConfig, RopeScaling
from tests.support.model.tiny_models import tiny_config

NOT_POSITIVE = (0, math.nan, math.inf, 10**400, "1", True)
WRONG: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("vocab_size", "width", "n_layers", "n_heads", "n_kv_heads", "head_dim", "context"),
                    (0, 1.0, "4", None, True, 2**31)),
    **dict.fromkeys(("mlp_width", "n_encoder_layers"), (-1, 1.5, None)),
    **dict.fromkeys(("norm", "norm_position", "positions", "activation", "attention_scale"),
                    ("surprise", None, 1, ["pre"])),
    **dict.fromkeys([field.name for field in fields(ModelConfig) if field.type == "bool"], (0, 1, "true", None)),
    **dict.fromkeys(("norm_eps", "embedding_scale"), (*NOT_POSITIVE, None)),
    **dict.fromkeys(("sliding_window", "rotary_dim"), (0, -1, 2.0, "9", True)),
    "rope_theta": (*NOT_POSITIVE, None, 5e-324, 0.9),
    "logit_soft_cap": NOT_POSITIVE,
    "rope_scaling": ("linear", 2.0, {}),
}  # fmt: skip
PLAIN = {"norm": "none", "final_norm": False, "positions": "none"}
RULES: list[tuple[dict[str, Any], str]] = [
    *[({name: value}, f"^{name} cannot be ") for name, values in WRONG.items() for value in values],
    ({"norm": "surprise"}, "one of rmsnorm, layernorm, none"),
    ({"rotary_dim": 1}, "must be even"),
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
    {"rope_theta": 1},
    {"positions": "none", "head_dim": 15, "mlp_width": 0, "norm_position": "post", "final_norm": False},
    {**PLAIN, "out_projection": False, "n_layers": 1, "context": 1, "vocab_size": 1},
    {"norm": "layernorm", "norm_bias": True, "parallel_residual": True, "rope_scaling": None, "sliding_window": None},
    {"n_encoder_layers": 2, "norm_position": "post", "rope_scaling": RopeScaling(kind="llama3", factor=2)},
]


@pytest.mark.parametrize("change", POSSIBLE)
def test_shapes_at_the_limit_of_a_rule_are_allowed(change: dict[str, Any]) -> None:
    config = tiny_config(**change)
    assert {name: getattr(config, name) for name in change} == change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "yarn"}, "kind of the rope scaling cannot be 'yarn'.*one of linear, llama3"),
        ({"kind": None}, "kind of the rope scaling"),
        *[({"factor": value}, "^factor of the rope scaling") for value in (*NOT_POSITIVE, None)],
        ({"low_freq_factor": 0}, "low_freq_factor"),
        ({"high_freq_factor": "4"}, "high_freq_factor"),
        ({"original_context": -8192}, "original_context"),
        ({"low_freq_factor": 4.0}, "must be below high_freq_factor"),
    ],
)
def test_impossible_rope_scalings_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RopeScaling(**{"kind": "llama3", "factor": 8.0, **change})
