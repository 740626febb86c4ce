"""Cases of smollm3."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import LLAMA, SCALED, YARN, FamilyCases, heads

_MINIMAL: dict[str, Any] = {
    **LLAMA,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "vocab_size": 99,
    "pad_token_id": 0,
}
_SLIDING = {"use_sliding_window": True, "sliding_window": 9}
_TYPES = ["full_attention", "sliding_attention", "full_attention"]

FAMILIES = (
    FamilyCases(
        name="smollm3",
        minimal=_MINIMAL,
        shapes={
            "a": {**heads(6, 2), "num_hidden_layers": 4},
            "b": {**heads(4, 1, 20), **_SLIDING, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
            | {"num_hidden_layers": 3, "no_rope_layer_interval": 2},
            "c": {**heads(4, 4), **_SLIDING, "num_hidden_layers": 3, "layer_types": _TYPES, "rope_parameters": YARN}
            | {"no_rope_layers": [1, 1, 0], "hidden_act": "gelu_pytorch_tanh"},
            "d": {**heads(4, 2), "no_rope_layers": [1, 1], "rope_parameters": SCALED, "rms_norm_eps": 1e-3},
        },
        variants=(
            {"rope_theta": 5e6, "num_key_value_heads": None},
            {"rope_theta": 5e6, "rope_scaling": None, "layer_types": None, "no_rope_layers": None},
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
            {"no_rope_layers": [0, 1, 1, 0, 1]},
            {"no_rope_layers": [1, 0, 1, 0, 1, 0, 1, 0]},
            {"no_rope_layer_interval": 1},
            {"no_rope_layer_interval": 2, **_SLIDING},
            {"sliding_window": 9},
            {**_SLIDING, "layer_types": ["sliding_attention"] * 5},
            {**_SLIDING, "sliding_window": None},
            {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "num_key_value_heads": 1},
        ),
        switches=(
            ("a", {"no_rope_layers": [1, 1, 1, 1]}),
            ("b", {"layer_types": ["full_attention"] * 3}),
            ("b", {"sliding_window": 10}),
            ("b", {"no_rope_layers": [1, 1, 1]}),
            ("c", {"layer_types": [*_TYPES[1:], *_TYPES[:1]]}),
            ("c", {"layer_types": ["full_attention"] * 3}),
            ("c", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
            ("c", {"hidden_act": "silu"}),
            ("d", {"rope_parameters": {**SCALED, "factor": 2.0}}),
            ("d", {"rms_norm_eps": 1e-6}),
        ),
        refused=(
            ({"no_rope_layers": [1, 0]}, "^no_rope_layers must be a list of 5 numbers"),
            ({"no_rope_layers": 4}, "^no_rope_layers must be a list of 5 numbers"),
            ({"no_rope_layers": [1, 0, 1, 0, 2]}, "^no_rope_layers must be a list of 5 numbers"),
            ({"no_rope_layers": [1] * 5, "num_hidden_layers": "5"}, "^num_hidden_layers cannot be '5'"),
            ({"no_rope_layer_interval": 0}, "^no_rope_layer_interval cannot be 0"),
            ({"no_rope_layer_interval": "4"}, "^no_rope_layer_interval cannot be '4'"),
            ({"use_sliding_window": "no"}, "^use_sliding_window cannot be 'no'"),
            ({"layer_types": ["sliding_attention"] * 5}, "^layer_types has sliding_attention.*use_sliding_window"),
            ({**_SLIDING, "sliding_window": "9"}, "^sliding_window cannot be '9'"),
            ({"layer_types": ["full_attention"]}, "a list of 5 names"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
            ({"num_hidden_layers": 2**31 - 1}, "^2147483647 layers of several kinds"),
        ),
        neutral={
            "no_rope_layer_interval": "makes no_rope_layers where these are missing, and transformers writes them"
        },
        buffers=("model.layers.0.self_attn.rotary_emb.inv_freq",),
    ),
)
