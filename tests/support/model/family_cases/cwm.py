"""Cases of cwm."""

from __future__ import annotations

from tests.support.model.family_cases import LLAMA, LLAMA3, SCALED, FamilyCases, heads

_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
_LLAMA3 = {**LLAMA3, "original_max_position_embeddings": 32}
_MIXED = ["sliding_attention", "full_attention"]

FAMILIES = (
    FamilyCases(
        name="cwm",
        minimal={**LLAMA, "num_attention_heads": 8, "num_hidden_layers": 5, "vocab_size": 99},
        shapes={
            "a": {**heads(6, 2, 20), "num_hidden_layers": 5, "sliding_window": 9, "tie_word_embeddings": True},
            "b": {**heads(4, 4, 12), "sliding_window": 17, "mlp_bias": True, "rope_parameters": _LLAMA3},
            "c": {**heads(8, 1, 24), "sliding_window": 9, "layer_types": _MIXED, "rope_parameters": SCALED}
            | {"rms_norm_eps": 1e-3, "hidden_act": "gelu"},
        },
        variants=(
            {"rope_theta": 5e5, "sliding_window": 7},
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "layer_types": ["full_attention"] * 5},
            {"rope_parameters": {"rope_type": "default"}, "layer_types": ["sliding_attention"] * 5},
            {"rope_parameters": _LLAMA3, "attention_bias": False},
            {"num_key_value_heads": 2, "head_dim": 20, "torch_dtype": "bfloat16", "tie_word_embeddings": True},
        ),
        switches=(
            ("a", {"sliding_window": 8}),
            ("a", {"layer_types": ["full_attention"] * 5}),
            ("b", {"rope_parameters": _DEFAULT}),
            ("c", {"layer_types": _MIXED[::-1]}),
            ("c", {"rope_parameters": _DEFAULT}),
            ("c", {"rms_norm_eps": 1e-5}),
            ("c", {"hidden_act": "silu"}),
        ),
        refused=(
            ({"attention_bias": True}, "^attention_bias True is not supported"),
            ({"mlp_bias": "no"}, "^mlp_bias cannot be 'no'"),
            ({"sliding_window": 0}, "^sliding_window cannot be 0"),
            ({"layer_types": _MIXED}, "a list of 5 names"),
            ({"rope_scaling": "llama3"}, "must be an object"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ),
        buffers=("model.layers.0.self_attn.rotary_emb.inv_freq",),
    ),
)
