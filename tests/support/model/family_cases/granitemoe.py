"""Cases of granitemoe, granitemoeshared."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import EXPERTS_NEUTRAL, LLAMA, LLAMA3, YARN, FamilyCases, heads

_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}
_MINIMAL: dict[str, Any] = {**LLAMA, **_EXPERTS, "num_attention_heads": 4, "vocab_size": 99}
_SCALES = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.5,
}
_SHAPES: dict[str, Any] = {
    "a": {**heads(6, 2, 20), **_EXPERTS, **_SCALES, "attention_bias": True, "tie_word_embeddings": True},
    "b": {**heads(4, 1), **_EXPERTS, **_SCALES, "num_local_experts": 9, "num_experts_per_tok": 4, "hidden_act": "gelu"}
    | {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}},
    "c": {**heads(3, 3, 24), **_EXPERTS, "attention_multiplier": 0.2, "rms_norm_eps": 1e-3, "rope_parameters": YARN},
}
_VARIANTS: tuple[dict[str, Any], ...] = (
    {"rope_theta": 5e5, "num_key_value_heads": None, "torch_dtype": "bfloat16"},
    {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1e7},
    {**_SCALES, "embedding_multiplier": 12, "logits_scaling": 16},
    {"attention_bias": True, "num_key_value_heads": 2},
)
_SWITCHES: tuple[tuple[str, dict[str, Any]], ...] = (
    *[("a", {key: 1.0}) for key in _SCALES],
    ("a", {"num_experts_per_tok": 3}),
    ("b", {"hidden_act": "silu"}),
    ("c", {"rms_norm_eps": 1e-6}),
)
_REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    *[({key: value}, f"^{key} cannot be") for key in _SCALES for value in (0, "width", None)],
    ({"num_local_experts": 0}, "^num_local_experts cannot be 0"),
    ({"num_experts_per_tok": 7}, "^chosen of the experts"),
    ({"intermediate_size": 0}, "^intermediate_size cannot be 0"),
    ({"partial_rotary_factor": 0.5}, "^partial_rotary_factor 0.5"),
    ({"attention_bias": None}, "^attention_bias cannot be None"),
)
_BUFFERS = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")

FAMILIES = (
    FamilyCases(
        name="granitemoe",
        minimal=_MINIMAL,
        shapes=_SHAPES,
        variants=_VARIANTS,
        switches=_SWITCHES,
        refused=_REFUSED,
        neutral=EXPERTS_NEUTRAL,
        buffers=_BUFFERS,
    ),
    FamilyCases(
        name="granitemoeshared",
        minimal=_MINIMAL,
        shapes={
            letter: {**shape, "shared_intermediate_size": size}
            for (letter, shape), size in zip(_SHAPES.items(), (17, 40, 0), strict=True)
        },
        variants=(*_VARIANTS, {"shared_intermediate_size": 9}),
        switches=_SWITCHES,
        refused=(*_REFUSED, ({"shared_intermediate_size": None}, "^shared_intermediate_size cannot be None")),
        neutral=EXPERTS_NEUTRAL,
        buffers=_BUFFERS,
    ),
)
