"""Cases of exaone4."""

from __future__ import annotations

from tests.support.model.family_cases import LLAMA, LLAMA3, YARN, FamilyCases, heads

_MIXED = ["sliding_attention", "full_attention"]
_FULL = ["full_attention"] * 2
_UNLIMITED = {"sliding_window": None, "layer_types": _FULL}

FAMILIES = (
    FamilyCases(
        name="exaone4",
        minimal={**LLAMA, "num_attention_heads": 32, "hidden_size": 64, "num_hidden_layers": 5, "vocab_size": 99},
        shapes={
            "a": {**heads(6, 2, 20), "sliding_window": 9, "layer_types": _MIXED},
            "b": {**heads(4, 1), **_UNLIMITED, "tie_word_embeddings": True}
            | {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}},
            "c": {**heads(3, 3, 24), "sliding_window": 64, "num_hidden_layers": 5, "rms_norm_eps": 1e-3},
            "d": {**heads(8, 2, 12), "sliding_window": 9, "layer_types": _FULL, "hidden_act": "gelu"},
            "e": {**heads(4, 2), "sliding_window": 50, "layer_types": _MIXED[::-1], "rope_parameters": YARN},
        },
        variants=(
            {"sliding_window_pattern": 2, "sliding_window": 7, "rope_theta": 1e6},
            {"sliding_window_pattern": "LG", "layer_types": [*_MIXED, *_MIXED, "full_attention"]},
            {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 5},
            {"sliding_window_pattern": 1, "tie_word_embeddings": True, "num_key_value_heads": 8},
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, "head_dim": 20},
        ),
        switches=(
            ("a", {"sliding_window": 10}),
            ("a", {"layer_types": _MIXED[::-1]}),
            ("b", {"sliding_window": 200}),
            ("b", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
            ("c", {"rms_norm_eps": 1e-5}),
            ("d", {"sliding_window": None}),
            ("e", {"rope_parameters": {**YARN, "factor": 2.0}}),
        ),
        refused=(
            ({"sliding_window_pattern": "LLLG"}, "^sliding_window_pattern cannot be 'LLLG'"),
            ({"sliding_window_pattern": 0}, "^sliding_window_pattern cannot be 0"),
            ({"sliding_window_pattern": None}, "^sliding_window_pattern cannot be None"),
            ({"sliding_window": 0}, "^sliding_window cannot be 0"),
            ({"layer_types": _MIXED}, "^layer_types must be a list of 5 names"),
            ({"partial_rotary_factor": 0.5}, "^partial_rotary_factor 0.5"),
            ({"hidden_size": "64"}, "^hidden_size cannot be '64'"),
        ),
        buffers=("model.rotary_emb.inv_freq",),
    ),
)
