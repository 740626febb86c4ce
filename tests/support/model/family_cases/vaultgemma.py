"""Cases of vaultgemma."""

from __future__ import annotations

from tests.support.model.family_cases import LLAMA, SCALED, FamilyCases, heads

_MIXED = ["sliding_attention", "full_attention"]
_WINDOW = {"sliding_window": 9, "query_pre_attn_scalar": 20}

FAMILIES = (
    FamilyCases(
        name="vaultgemma",
        minimal={**LLAMA, "num_attention_heads": 8, "num_hidden_layers": 3, "vocab_size": 99},
        shapes={
            "a": {**heads(6, 2, 20), **_WINDOW, "tie_word_embeddings": False, "rope_parameters": SCALED},
            "b": {**heads(4, 1, 32), **_WINDOW, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
            "c": {**heads(4, 4, 12), **_WINDOW, "attn_logit_softcapping": None, "hidden_activation": "silu"}
            | {"rms_norm_eps": 1e-3, "layer_types": _MIXED[::-1]},
        },
        variants=(
            {"sliding_window": None},
            {"attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_theta": 5e3},
            {"layer_types": ["full_attention"] * 3, "sliding_window": 9, "num_key_value_heads": 2},
            {"query_pre_attn_scalar": 144, "hidden_activation": "gelu", "head_dim": 20},
            {"torch_dtype": "bfloat16", "tie_word_embeddings": False},
        ),
        switches=(
            ("a", {"sliding_window": 8}),
            ("a", {"layer_types": _MIXED[::-1]}),
            ("a", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
            ("b", {"attn_logit_softcapping": None}),
            ("b", {"final_logit_softcapping": 30.0}),
            ("b", {"dtype": "bfloat16"}),
            ("c", {"query_pre_attn_scalar": 12}),
            ("c", {"rms_norm_eps": 1e-6}),
        ),
        refused=(
            ({"query_pre_attn_scalar": 0}, "^query_pre_attn_scalar"),
            ({"attention_bias": True}, "^attention_bias True"),
            ({"layer_types": _MIXED}, "a list of 3 names"),
            ({"sliding_window": 0}, "^sliding_window cannot be 0"),
        ),
        activation_key="hidden_activation",
    ),
)
