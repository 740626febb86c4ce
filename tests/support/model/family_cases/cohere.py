"""Cases of cohere2."""

from __future__ import annotations

from tests.support.model.family_cases import LLAMA, SCALED, FamilyCases, heads

_MIXED = ["sliding_attention", "full_attention"]
_FULL = ["full_attention"] * 2

FAMILIES = (
    FamilyCases(
        name="cohere2",
        minimal={**LLAMA, "num_attention_heads": 4, "num_hidden_layers": 5, "vocab_size": 99},
        shapes={
            "a": {**heads(6, 2, 20), "sliding_window": 9, "layer_types": _MIXED, "attention_bias": True},
            "b": {**heads(4, 1), "sliding_window": 64, "num_hidden_layers": 5, "tie_word_embeddings": False},
            "c": {**heads(4, 2), "sliding_window": 30, "layer_types": _MIXED[::-1], "logit_scale": 1.5}
            | {"layer_norm_eps": 1e-3, "hidden_act": "gelu", "rope_parameters": SCALED},
            "d": {**heads(3, 3), "sliding_window": 9, "layer_types": _FULL},
        },
        variants=(
            {"sliding_window_pattern": 2, "sliding_window": 7, "rope_theta": 5e4},
            {"sliding_window_pattern": 1},
            {"layer_types": [*_MIXED, *_MIXED, "full_attention"], "sliding_window_pattern": None},
            {"sliding_window": None, "layer_types": ["full_attention"] * 5, "num_key_value_heads": None},
            {"tie_word_embeddings": False, "attention_bias": True, "torch_dtype": "float16", "logit_scale": 1.0},
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "num_key_value_heads": 2},
            {"use_qk_norm": False, "use_parallel_block": True, "position_embedding_type": "rope_gptj"},
            {"layer_norm_eps": 1e-6, "head_dim": 20},
        ),
        switches=(
            ("a", {"sliding_window": 10}),
            ("a", {"layer_types": _MIXED[::-1]}),
            ("b", {"sliding_window": None}),
            ("c", {"logit_scale": 1.25}),
            ("c", {"layer_norm_eps": 1e-5}),
            ("c", {"rope_parameters": {**SCALED, "factor": 2.0}}),
            ("d", {"layer_types": _MIXED}),
        ),
        refused=(
            ({"sliding_window_pattern": 0}, "^sliding_window_pattern cannot be 0"),
            ({"sliding_window_pattern": None}, "^sliding_window_pattern cannot be None"),
            ({"sliding_window": "9"}, "^sliding_window cannot be '9'"),
            ({"layer_types": _MIXED}, "^layer_types must be a list of 5 names"),
            ({"logit_scale": 0}, "^logit_scale cannot be 0"),
            ({"layer_norm_eps": None}, "^layer_norm_eps cannot be None"),
            ({"attention_bias": 1}, "^attention_bias cannot be 1"),
            ({"use_qk_norm": True}, "^use_qk_norm True"),
            ({"use_parallel_block": False}, "^use_parallel_block False"),
            ({"use_gated_activation": False}, "^use_gated_activation False"),
            ({"position_embedding_type": "rope"}, "^position_embedding_type 'rope'"),
            ({"rotary_pct": 0.5}, "^rotary_pct 0.5"),
            ({"partial_rotary_factor": 0.5}, "^partial_rotary_factor 0.5"),
        ),
        buffers=("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
    ),
)
