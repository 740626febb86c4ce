"""Cases of ministral3."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import LLAMA, SCALED, YARN, FamilyCases, heads

_ROPE: dict[str, Any] = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
_PLAIN = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 2.0}

FAMILIES = (
    FamilyCases(
        name="ministral3",
        minimal={**LLAMA, "num_attention_heads": 8, "vocab_size": 99},
        shapes={
            "a": {**heads(6, 2, 20), "rope_parameters": _ROPE},
            "b": {**heads(4, 1, 12), "rope_parameters": {**_ROPE, "mscale_all_dim": 0.5}, "sliding_window": 17}
            | {"tie_word_embeddings": True},
            "c": {**heads(4, 4, 24), "rope_parameters": {**_PLAIN, "original_max_position_embeddings": 24}}
            | {"rms_norm_eps": 1e-3, "hidden_act": "gelu"},
        },
        variants=(
            {"rope_parameters": None},
            {"rope_theta": 5e5},
            {"rope_parameters": {**_ROPE, "type": "yarn", "max_position_embeddings": 128, "beta_fast": 16.0}},
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}, "rope_theta": 1e6},
            {"rope_parameters": {key: _ROPE[key] for key in _ROPE if key != "original_max_position_embeddings"}},
            {"rope_parameters": {**SCALED, "llama_4_scaling_beta": 1, "original_max_position_embeddings": 32}},
            {"head_dim": 20, "sliding_window": 7},
            {"torch_dtype": "bfloat16", "tie_word_embeddings": True, "num_key_value_heads": 2},
        ),
        switches=(
            ("a", {"rope_parameters": {**_ROPE, "llama_4_scaling_beta": 0.2}}),
            ("a", {"rope_parameters": {**_ROPE, "original_max_position_embeddings": 64}}),
            ("b", {"rope_parameters": {**_ROPE, "mscale_all_dim": 1.0}}),
            ("b", {"sliding_window": None}),
            ("b", {"sliding_window": 18}),
            ("c", {"rope_parameters": {**_PLAIN, "original_max_position_embeddings": 25}}),
            ("c", {"rms_norm_eps": 1e-6}),
            ("c", {"hidden_act": "silu"}),
        ),
        refused=(
            ({"rope_parameters": YARN}, "llama_4_scaling_beta.* is missing"),
            ({"rope_parameters": {**_ROPE, "llama_4_scaling_beta": None}}, "^llama_4_scaling_beta cannot be None"),
            ({"rope_parameters": {**_ROPE, "llama_4_scaling_beta": -0.1}}, "^llama_4_scaling_beta cannot be -0.1"),
            ({"rope_parameters": {**_ROPE, "original_max_position_embeddings": "32"}}, "^original_max_position_emb"),
            ({"layer_types": ["sliding_attention", "full_attention"]}, "^layer_types .*is not supported, only None"),
            ({"sliding_window": 0}, "^sliding_window cannot be 0"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ),
        buffers=("model.layers.0.self_attn.rotary_emb.inv_freq",),
    ),
)
