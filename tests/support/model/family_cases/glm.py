"""Cases of glm, glm4."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import LLAMA, SCALED, YARN, FamilyCases, heads

_PADDING = {"pad_token_id": 0}
"""The default is above 99."""
_MINIMAL: dict[str, Any] = {**LLAMA, "num_attention_heads": 4, "vocab_size": 99, **_PADDING}
_WHOLE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
_QUARTER = {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.25}
_SHAPES: dict[str, dict[str, Any]] = {
    "a": heads(6, 2, 20),
    "b": {**heads(4, 1, 16), "attention_bias": False, "tie_word_embeddings": True, "rope_parameters": _WHOLE},
    "c": {**heads(3, 3, 24), "rms_norm_eps": 1e-3, "hidden_act": "gelu", "rope_parameters": _QUARTER},
    "d": {**heads(4, 2, 12), "rope_parameters": {**SCALED, "partial_rotary_factor": 0.5}},
    "e": {**heads(8, 2, 16), "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
}
_VARIANTS: tuple[dict[str, Any], ...] = (
    {"partial_rotary_factor": 0.25, "rope_theta": 5e3},
    {"rope_parameters": {"rope_theta": 5e3}},
    {"rope_parameters": _WHOLE, "partial_rotary_factor": 0.25},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "head_dim": 24},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, "rope_theta": 1e5},
    {"attention_bias": False, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "num_key_value_heads": 4},
)
_SWITCHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("a", {"rope_parameters": _WHOLE}),
    ("b", {"rope_parameters": _QUARTER}),
    ("c", {"rms_norm_eps": 1.5625e-7}),
    ("d", {"rope_parameters": {**SCALED, "factor": 2.0, "partial_rotary_factor": 0.5}}),
    ("e", {"rope_parameters": {**YARN, "factor": 2.0, "partial_rotary_factor": 0.5}}),
)
_REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"partial_rotary_factor": None}, "^partial_rotary_factor cannot be None"),
    ({"partial_rotary_factor": 2}, "^partial_rotary_factor cannot be 2"),
    ({"partial_rotary_factor": "0.5"}, "^partial_rotary_factor cannot be '0.5'"),
    ({"head_dim": 18}, "its dim must be even"),
    ({"head_dim": "16"}, "^head_dim cannot be '16'"),
    ({"attention_bias": None}, "^attention_bias cannot be None"),
    ({"rms_norm_eps": 0}, "^rms_norm_eps cannot be 0"),
    ({"rope_theta": 0}, "^rope_theta cannot be 0"),
    ({"rope_scaling": {"type": "mrope"}}, "'mrope' is not supported"),
)


def _cases(name: str) -> FamilyCases:
    return FamilyCases(
        name=name,
        minimal=_MINIMAL,
        shapes={letter: {**shape, **_PADDING} for letter, shape in _SHAPES.items()},
        variants=_VARIANTS,
        switches=_SWITCHES,
        refused=_REFUSED,
        buffers=("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
    )


FAMILIES = (_cases("glm"), _cases("glm4"))
