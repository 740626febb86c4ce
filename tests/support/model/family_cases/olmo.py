"""Cases of olmo, olmo2, olmo3."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import LLAMA, LLAMA3, SCALED, YARN, FamilyCases, heads

_MINIMAL: dict[str, Any] = {**LLAMA, "num_attention_heads": 4, "vocab_size": 99}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
_BUFFERS = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
_TYPES = ["sliding_attention", "full_attention"]
_LOCAL = {"rope_type": "default", "rope_theta": 5e3}
_ROPES = {"full_attention": YARN, "sliding_attention": _LOCAL}
_UNSCALED = {"full_attention": _DEFAULT, "sliding_attention": _LOCAL}

FAMILIES = (
    FamilyCases(
        name="olmo",
        minimal=_MINIMAL,
        shapes={
            "a": {**heads(4, 4), "tie_word_embeddings": True},
            "b": {**heads(6, 2), "hidden_size": 120, "attention_bias": True, "rope_parameters": SCALED},
            "c": {**heads(4, 1, 20), "hidden_act": "gelu_pytorch_tanh", "rope_parameters": YARN},
        },
        variants=(
            {"clip_qkv": None, "rope_theta": 5e5, "rope_scaling": None, "num_key_value_heads": None},
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "attention_bias": True},
            {"tie_word_embeddings": True, "torch_dtype": "bfloat16", "num_key_value_heads": 2},
        ),
        switches=(
            ("b", {"rope_parameters": _DEFAULT}),
            ("c", {"hidden_act": "silu"}),
            ("c", {"rope_parameters": {**YARN, "factor": 2.0}}),
        ),
        refused=(
            ({"clip_qkv": 8.0}, "^clip_qkv 8.0 is not supported, only None"),
            ({"attention_bias": "no"}, "^attention_bias cannot be 'no'"),
            ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ),
        buffers=_BUFFERS,
    ),
    FamilyCases(
        name="olmo2",
        minimal=_MINIMAL,
        shapes={
            "a": {**heads(4, 4), "tie_word_embeddings": True},
            "b": {**heads(6, 2, 20), "attention_bias": True, "rms_norm_eps": 1e-3},
            "c": {**heads(8, 1, 12), "hidden_act": "gelu", "rope_parameters": SCALED},
            "d": {**heads(4, 2), "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}},
        },
        variants=(
            {"rope_theta": 5e5, "rope_scaling": None, "num_key_value_heads": None},
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "attention_bias": True, "rms_norm_eps": 1e-6},
            {"tie_word_embeddings": True, "torch_dtype": "bfloat16", "num_key_value_heads": 2},
        ),
        switches=(
            ("b", {"rms_norm_eps": 1e-6}),
            ("c", {"hidden_act": "silu"}),
            ("c", {"rope_parameters": _DEFAULT}),
            ("d", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ),
        refused=(
            ({"clip_qkv": 8.0}, "^clip_qkv 8.0 is not supported, only None"),
            ({"rms_norm_eps": "1e-5"}, "^rms_norm_eps cannot be '1e-5'"),
        ),
        buffers=_BUFFERS,
    ),
    FamilyCases(
        name="olmo3",
        minimal={**_MINIMAL, "num_hidden_layers": 5},
        shapes={
            "a": {**heads(4, 4), "num_hidden_layers": 4, "sliding_window": 17},
            "b": {**heads(6, 2, 20), "sliding_window": 9, "layer_types": _TYPES, "rope_parameters": _ROPES}
            | {"attention_bias": True, "tie_word_embeddings": True},
            "c": {**heads(4, 1, 12), "sliding_window": 5, "layer_types": _TYPES[::-1], "rope_parameters": _UNSCALED}
            | {"rms_norm_eps": 1e-3, "hidden_act": "relu"},
        },
        variants=(
            {"rope_theta": 500_000, "rope_scaling": None, "num_key_value_heads": None, "layer_types": None},
            {"rope_scaling": {**YARN, "rope_theta": 500_000, "attention_factor": 1.2}, "rope_theta": 500_000},
            {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}},
            {"rope_parameters": _ROPES, "sliding_window": 9},
            {"rope_parameters": {"full_attention": YARN}},
            {"rope_parameters": {"sliding_attention": SCALED, "full_attention": None}},
            {"layer_types": ["full_attention"] * 5},
            {"layer_types": ["sliding_attention"] * 5, "rope_parameters": _UNSCALED},
            {"torch_dtype": "bfloat16", "num_key_value_heads": 2, "tie_word_embeddings": True, "attention_bias": True},
        ),
        switches=(
            ("a", {"sliding_window": 18}),
            ("a", {"layer_types": ["sliding_attention"] * 4}),
            ("b", {"rope_parameters": {**_ROPES, "full_attention": _DEFAULT}}),
            ("b", {"rope_parameters": {**_ROPES, "sliding_attention": YARN}}),
            ("b", {"layer_types": _TYPES[::-1]}),
            ("c", {"rope_parameters": {**_UNSCALED, "sliding_attention": _DEFAULT}}),
            ("c", {"rms_norm_eps": 1e-6}),
            ("c", {"hidden_act": "silu"}),
        ),
        refused=(
            ({"rope_theta": 1e6}, "^rope_theta 1000000.0 is not supported, only 500000.0 or None"),
            ({"rope_parameters": YARN}, "^rope_parameters must name .*full_attention and sliding_attention"),
            ({"rope_parameters": "yarn"}, "^rope_parameters must name|must be an object"),
            ({"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor"),
            ({"rope_parameters": {"full_attention": 3}}, "full_attention"),
            ({"sliding_window": None}, "^sliding_window cannot be None"),
            ({"sliding_window": 0}, "^sliding_window cannot be 0"),
            ({"layer_types": ["chunked_attention"] * 5}, "'chunked_attention'.*not supported"),
            ({"clip_qkv": 8.0}, "^clip_qkv 8.0 is not supported, only None"),
        ),
        buffers=_BUFFERS,
    ),
)
