"""ModelConfig: for every rule, a shape that breaks it and an error that names what to change."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from model.config import ConfigError, Experts, LayerKind, ModelConfig, Rope
from tests.support.model.tiny_models import tiny_config

NOT_POSITIVE = (0, math.nan, math.inf, 10**400, "1", True)
WRONG: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("vocab_size", "width", "n_layers", "n_heads", "n_kv_heads", "head_dim", "context"),
                    (0, 1.0, "4", None, True, 2**31)),
    **dict.fromkeys(("mlp_width", "n_encoder_layers"), (-1, 1.5, None)),
    **dict.fromkeys(("norm", "norm_position", "positions", "activation", "qk_norm"), ("surprise", None, 1, ["pre"])),
    "attention_scale": ("surprise", None, 0, -1.0, math.nan, True, ["width"]),
    **dict.fromkeys([field.name for field in fields(ModelConfig) if field.type == "bool"], (0, 1, "true", None)),
    **dict.fromkeys(("norm_eps", "embedding_scale", "residual_scale", "logit_scale"), (*NOT_POSITIVE, None)),
    **dict.fromkeys(("logit_soft_cap", "attention_soft_cap"), NOT_POSITIVE),
    "query_scale": (1.0, "llama4", {}),
    "experts": (8, "many", {}, {"count": 4}),
    "layer_kinds": ("full", 2.0, (3,), LayerKind()),
    "layer_types": (1, (0.5, 0.5), (-1, 0), ("0", "0"), None),
}  # fmt: skip
MIXED = {"layer_kinds": (LayerKind(mlp="experts"),), "mlp_width": 0}
EXPERTS = {**MIXED, "experts": Experts(count=4, chosen=2, width=8)}
SHARED = {**MIXED, "experts": Experts(count=4, chosen=2, width=8, shared_width=8)}
PLAIN = {"norm": "none", "final_norm": False, "rope": None}
LOCAL, GLOBAL = LayerKind(window=8, rope=Rope()), LayerKind()
RULES: list[tuple[dict[str, Any], str]] = [
    *[({name: value}, f"^{name} cannot be ") for name, values in WRONG.items() for value in values],
    ({"norm": "surprise"}, "one of rmsnorm, layernorm, none"),
    ({"rope": Rope(dim=1)}, "must be even"),
    ({"n_kv_heads": 3}, r"n_heads \(4\) must be a multiple of n_kv_heads \(3\)"),
    ({"n_kv_heads": 8}, "multiple"),
    ({"head_dim": 15}, r"at most head_dim \(15\), not 15"),
    ({"rope": Rope(dim=5)}, "must be even"),
    ({"rope": Rope(dim=18)}, r"at most head_dim \(16\), not 18"),
    ({"layer_kinds": (GLOBAL, LayerKind(rope=Rope(dim=18))), "layer_types": (0, 1)}, "at most head_dim"),
    ({"layer_kinds": ()}, "must not be empty"),
    ({"layer_kinds": tuple(LayerKind(window=n) for n in range(1, 66))}, "at most 64 kinds"),
    ({"layer_kinds": (LOCAL, LOCAL), "layer_types": (0, 1)}, "name a kind twice"),
    ({"layer_kinds": (LOCAL, GLOBAL)}, "since there are 2 kinds"),
    ({"layer_kinds": (LOCAL, GLOBAL), "layer_types": (0, 0)}, "use each of the 2 layer_kinds"),
    ({"layer_kinds": (LOCAL, GLOBAL), "layer_types": (0, 2)}, "use each of the 2 layer_kinds"),
    ({"layer_kinds": (LOCAL, GLOBAL), "layer_types": (0, 1, 1)}, "one index for each of the 2 layers"),
    ({"layer_types": (0, 0)}, "empty if there is only one"),
    ({"norm": "none"}, "need a norm, not norm none"),
    ({"norm": "none", "final_norm": False, "norm_position": "post"}, "need a norm, not norm none"),
    *[({**PLAIN, "norm_position": position}, "need a norm, not norm none") for position in ("output", "sandwich")],
    ({**PLAIN, "embedding_norm": True}, "need a norm, not norm none"),
    ({"norm_offset": True, "norm_weight": False}, "need norm_weight"),
    ({"norm": "layernorm", "norm_bias": True, "norm_weight": False}, "need norm_weight"),
    ({"shared_norm": True}, "shared_norm needs parallel_residual"),
    ({"qk_norm_after_rope": True}, "qk_norm_after_rope needs qk_norm head"),
    ({"qk_norm_after_rope": True, "qk_norm": "width"}, "qk_norm_after_rope needs qk_norm head"),
    ({"out_projection": False, "norm_position": "sandwich"}, "norm_position must be pre or post"),
    ({"out_projection": False, "residual_scale": 0.5}, "residual_scale 1"),
    ({"norm_position": "output", "residual_scale": 0.5}, "cancels the residual_scale"),
    ({"norm_position": "sandwich", "residual_scale": 2.0}, "cancels the residual_scale"),
    ({"rope": Rope(kind="longrope", short_factors=(1.0,) * 7, long_factors=(2.0,) * 7)}, "longrope needs 8"),
    ({**EXPERTS, "experts": None}, "if and only if a layer kind has mlp experts"),
    ({"experts": Experts(count=4, chosen=2, width=8)}, "if and only if a layer kind has mlp experts"),
    ({**EXPERTS, "mlp_width": 8}, "without dense layers mlp_width must be 0"),
    ({**EXPERTS, "mlp_bias": True}, "mlp_bias needs a feed-forward"),
    ({**EXPERTS, "parallel_residual": True}, "parallel_residual needs"),
    ({**EXPERTS, "activation": "xielu"}, "no activation with parameters"),
    ({**EXPERTS, "n_encoder_layers": 1}, "supports no experts or sinks"),
    ({"sinks": True, "n_encoder_layers": 1}, "supports no experts or sinks"),
    *[
        ({**SHARED, "norm_position": name}, "shared_width need norm_position pre or post")
        for name in ("output", "sandwich")
    ],
    ({"activation": "swiglu_clamped", "gated": False}, "swiglu_clamped needs gated"),
    ({"n_encoder_layers": 1, "attention_soft_cap": 9.0}, "neither query_scale nor attention_soft_cap"),
    ({"n_encoder_layers": 1, "embedding_norm": True}, "nor embedding_norm"),
    ({"norm_bias": True}, "norm_bias needs layernorm, not rmsnorm"),
    ({**PLAIN, "norm_bias": True}, "norm_bias needs layernorm, not none"),
    ({"mlp_width": 0, "mlp_bias": True}, "mlp_bias needs a feed-forward"),
    ({"mlp_width": 0, "parallel_residual": True}, "parallel_residual needs"),
    ({"norm_position": "post", "parallel_residual": True}, "parallel_residual needs"),
    ({"out_projection": False, "head_dim": 18}, r"4 heads of 18 must add up to the width \(64\)"),
    ({"out_projection": False, "out_bias": True}, "without bias"),
    ({"n_encoder_layers": 1, "parallel_residual": True}, "an encoder supports neither"),
    ({"n_encoder_layers": 1, "window": 8}, "an encoder supports neither"),
    ({"n_encoder_layers": 1, "layer_kinds": (LOCAL, GLOBAL), "layer_types": (0, 1)}, "an encoder supports neither"),
]


@pytest.mark.parametrize(("change", "words"), RULES)
def test_impossible_shapes_are_refused_in_one_sentence(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        tiny_config(**change)
    assert "\n" not in str(caught.value)


POSSIBLE: list[dict[str, Any]] = [
    {},
    {"n_kv_heads": 1, "head_dim": 2, "layer_kinds": (LayerKind(window=1, rope=Rope(theta=1, dim=2)),)},
    {"logit_soft_cap": 30, "norm_eps": 1},
    {"layer_kinds": (GLOBAL,), "head_dim": 15, "mlp_width": 0, "norm_position": "post", "final_norm": False},
    {"positions": "learned", "layer_kinds": (LOCAL, GLOBAL), "layer_types": (1, 0)},
    {"norm": "none", "final_norm": False, "out_projection": False, "n_layers": 1, "context": 1, "vocab_size": 1},
    {"norm": "layernorm", "norm_bias": True, "parallel_residual": True, "logit_soft_cap": None},
    {"n_encoder_layers": 2, "norm_position": "post", "layer_kinds": (LayerKind(rope=Rope(kind="llama3", factor=2)),)},
]


@pytest.mark.parametrize("change", POSSIBLE)
def test_shapes_at_the_limit_of_a_rule_are_allowed(change: dict[str, Any]) -> None:
    config = tiny_config(**change)
    assert {name: getattr(config, name) for name in change} == change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "ntk"}, "kind of the rope cannot be 'ntk'.*one of default, linear, llama3, yarn, longrope"),
        ({"kind": "yarn", "theta": 1.0}, "yarn needs a theta above 1"),
        ({"kind": "yarn", "beta_fast": 1.0, "beta_slow": 2.0}, "beta_slow must not be above"),
        ({"kind": "longrope"}, "if and only if the kind is longrope, not 0 and 0"),
        ({"kind": "longrope", "short_factors": (1.0,), "long_factors": (1.0, 1.0)}, "not 1 and 2"),
        ({"short_factors": (1.0,), "long_factors": (1.0,)}, "not 1 and 1"),
        ({"kind": "longrope", "short_factors": (1.0,), "long_factors": (0.0,)}, "^long_factors of the rope"),
        ({"attention_factor": 0}, "^attention_factor of the rope"),
        ({"kind": None}, "kind of the rope"),
        *[({"factor": value}, "^factor of the rope") for value in (*NOT_POSITIVE, None)],
        *[({"theta": value}, "^theta of the rope") for value in (*NOT_POSITIVE, None, 5e-324, 0.9)],
        *[({"dim": value}, "^dim of the rope") for value in (0, -1, 2.0, "9", True)],
        ({"low_freq_factor": 0}, "low_freq_factor"),
        ({"high_freq_factor": "4"}, "high_freq_factor"),
        ({"original_context": -8192}, "original_context"),
        ({"low_freq_factor": 4.0}, "must be below high_freq_factor"),
    ],
)
def test_impossible_ropes_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Rope(**{"kind": "llama3", "factor": 8.0, **change})


@pytest.mark.parametrize("change", [*({"window": value} for value in (0, -1, 2.0, "9", True)), {"rope": 3}])
def test_impossible_layer_kinds_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(change))} of a layer kind cannot be "):
        LayerKind(**change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": 0}, "^count of the experts cannot be 0"),
        ({"count": 4097}, "^count of the experts cannot be 4097"),
        ({"chosen": 5}, r"^chosen of the experts \(5\) must not be above count \(4\)"),
        ({"score": "best"}, "one of softmax, sigmoid, softmax_of_chosen"),
        ({"score": "softmax_of_chosen", "normalized": True}, "adds up to 1 without normalized"),
        ({"score": "softmax_of_chosen", "choice_bias": True}, "without choice_bias"),
    ],
)
def test_impossible_experts_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Experts(**{"count": 4, "chosen": 2, "width": 8, **change})


def test_layers_have_the_kinds_that_layer_types_says() -> None:
    config = tiny_config(n_layers=3, layer_kinds=(LOCAL, GLOBAL), layer_types=(1, 0, 1))
    assert config.layers == (GLOBAL, LOCAL, GLOBAL) and config.windows == (None, 8, None)
    assert config.ropes == (Rope(),) and [config.rotated_dim(kind.rope) for kind in config.layers] == [0, 16, 0]
    assert tiny_config(window=8, n_layers=3).layers == (LOCAL,) * 3
