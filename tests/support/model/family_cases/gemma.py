"""Cases of gemma, gemma2, gemma3_text."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import LLAMA, FamilyCases, heads

_MINIMAL: dict[str, Any] = {
    **LLAMA,
    "num_attention_heads": 16,
    "hidden_size": 64,
    "num_hidden_layers": 7,
    "vocab_size": 99,
}
_MIXED = ["sliding_attention", "full_attention"]
_WINDOW = {"sliding_window": 9, "query_pre_attn_scalar": 20}
_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}

FAMILIES = (
    FamilyCases(
        name="gemma",
        minimal=_MINIMAL,
        shapes={
            "a": heads(6, 2, 20),
            "b": {**heads(4, 1, 32), "tie_word_embeddings": False},
            "c": {**heads(3, 3, 24), "rms_norm_eps": 1e-3},
        },
        variants=({"hidden_act": "gelu"}, {"head_dim": 20, "rope_theta": 5e3}, {"torch_dtype": "bfloat16"}),
        switches=(("c", {"rms_norm_eps": 1e-6}), ("b", {"dtype": "bfloat16"}), ("a", {"hidden_act": "silu"})),
        refused=(
            ({"attention_bias": True}, "attention_bias True"),
            ({"use_bidirectional_attention": True}, "only None or"),
        ),
        activation_key="",
    ),
    FamilyCases(
        name="gemma2",
        minimal=_MINIMAL,
        shapes={
            "a": {**heads(6, 2, 20), **_WINDOW},
            "b": {**heads(4, 1, 32), **_WINDOW, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
            "c": {**heads(4, 4, 12), **_WINDOW, "attn_logit_softcapping": None, "hidden_activation": "silu"},
        },
        variants=(
            {"sliding_window": None},
            {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            {"layer_types": ["full_attention"] * 7, "sliding_window": 9},
            {"query_pre_attn_scalar": 144, "hidden_activation": "gelu"},
        ),
        switches=(
            ("a", {"sliding_window": 8}),
            ("a", {"layer_types": _MIXED[::-1]}),
            ("b", {"attn_logit_softcapping": None}),
            ("b", {"final_logit_softcapping": 30.0}),
            ("c", {"query_pre_attn_scalar": 12}),
        ),
        refused=(
            ({"query_pre_attn_scalar": 0}, "^query_pre_attn_scalar"),
            ({"attn_logit_softcapping": -1.0}, "attention_soft_cap"),
            ({"layer_types": _MIXED}, "a list of 7 names"),
        ),
        activation_key="hidden_activation",
    ),
    FamilyCases(
        name="gemma3_text",
        minimal=_MINIMAL,
        shapes={
            "a": {**heads(6, 2, 20), **_WINDOW, "layer_types": _MIXED},
            "b": {**heads(4, 1, 32), **_WINDOW, "layer_types": _MIXED, "rope_parameters": _ROPES},
            "c": {**heads(4, 4, 12), **_WINDOW, "num_hidden_layers": 7, "final_logit_softcapping": 2.0},
        },
        variants=(
            {"rope_local_base_freq": 5e3, "rope_theta": 2e6},
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6},
            {"rope_parameters": _ROPES},
            {"sliding_window_pattern": 3, "sliding_window": 7},
            {"layer_types": ["full_attention"] * 7, "torch_dtype": "bfloat16"},
        ),
        switches=(
            ("a", {"sliding_window": 8}),
            ("a", {"layer_types": _MIXED[::-1]}),
            ("b", {"rope_parameters": {**_ROPES, "full_attention": _ROPES["sliding_attention"]}}),
            ("c", {"final_logit_softcapping": None}),
        ),
        refused=(
            ({"sliding_window_pattern": 0}, "^sliding_window_pattern"),
            ({"rope_local_base_freq": "1e4"}, "^rope_local_base_freq"),
            ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ),
        activation_key="hidden_activation",
    ),
)
