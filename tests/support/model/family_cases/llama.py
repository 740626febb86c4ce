"""Cases of llama, mistral, qwen2, qwen3."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import LLAMA, LLAMA3, SCALED, YARN, FamilyCases, heads

_MINIMAL: dict[str, Any] = {**LLAMA, "num_attention_heads": 4, "vocab_size": 99}
_OTHERS = {**_MINIMAL, "num_attention_heads": 32, "hidden_size": 64}
_SLIDING = {"use_sliding_window": True, "max_window_layers": 0}
_LOW_HIGH = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_BUFFERS = ("model.layers.0.self_attn.rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq")
_MIXED = ["full_attention", "sliding_attention"]

FAMILIES = (
    FamilyCases(
        name="llama",
        minimal=_MINIMAL,
        shapes={
            "a": {**heads(6, 2, 20), "attention_bias": True, "rope_parameters": SCALED, "tie_word_embeddings": True},
            "b": {
                **heads(4, 4),
                "mlp_bias": True,
                "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32},
            },
            "c": {**heads(8, 2, 24), "rms_norm_eps": 1e-3, "hidden_act": "gelu_pytorch_tanh"},
            "d": {**heads(4, 2), "rope_parameters": YARN},
        },
        variants=(
            {"rope_theta": 5e5},
            {"rope_theta": 10_000, "rope_scaling": None, "num_key_value_heads": None, "head_dim": None},
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4}},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **_LOW_HIGH}},
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, **_LOW_HIGH}},
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7e3}, "rope_theta": 9e3},
            {"rope_parameters": {"rope_theta": 7e3}, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
            {"rope_parameters": {**YARN, "beta_fast": 16.0, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False}},
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            {"tie_word_embeddings": True, "torch_dtype": "bfloat16", "num_key_value_heads": 1, "head_dim": 20},
            {"dtype": "float16", "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5},
        ),
        switches=(
            ("a", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
            ("b", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
            ("c", {"rms_norm_eps": 1e-6}),
            ("c", {"hidden_act": "silu"}),
            ("d", {"rope_parameters": {**YARN, "attention_factor": 1.0}}),
            ("d", {"rope_parameters": {**YARN, "factor": 2.0}}),
        ),
        refused=(
            *[({"rope_scaling": {"type": kind, "factor": 2.0}}, kind) for kind in ("mrope", "proportional")],
            ({"rope_scaling": {"type": "linear"}}, "factor"),
            ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
            ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "low_freq_factor"),
            ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor"),
            ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": "1", "mscale_all_dim": 1}}, "mscale"),
            ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "short_factor"),
            ({"rope_scaling": {"type": "longrope", "factor": 4.0, "short_factor": 1, "long_factor": 2}}, "be a list"),
            ({"rope_scaling": "linear"}, "must be an object"),
            ({"rope_scaling": {"type": ["linear"]}}, "linear"),
            ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
            ({"hidden_act": "mish"}, "'mish' is not supported.*gelu_new"),
            ({"hidden_act": "xielu"}, "'xielu' is not supported"),
        ),
        buffers=_BUFFERS,
        is_written=True,
    ),
    FamilyCases(
        name="mistral",
        minimal=_OTHERS,
        shapes={
            "a": {**heads(6, 2, 20), "sliding_window": 17},
            "b": {**heads(4, 1), "sliding_window": None, "tie_word_embeddings": True},
            "c": {**heads(3, 3, 24), "sliding_window": 64, "hidden_act": "relu"},
        },
        variants=({"sliding_window": None, "num_key_value_heads": 4}, {"sliding_window": 7, "rope_theta": 1e6}),
        switches=(("a", {"sliding_window": None}), ("a", {"sliding_window": 18}), ("c", {"sliding_window": 63})),
        refused=(({"sliding_window": 0}, "sliding_window"), ({"sliding_window": "9"}, "sliding_window")),
        buffers=_BUFFERS,
    ),
    FamilyCases(
        name="qwen2",
        minimal=_OTHERS,
        shapes={
            "a": {**heads(6, 2), "hidden_size": 120, "tie_word_embeddings": True},
            "b": {**heads(4, 4), **_SLIDING, "sliding_window": 10, "rope_parameters": {**SCALED, "rope_theta": 1e6}},
            "c": {**heads(4, 1), "hidden_size": 96, **_SLIDING, "sliding_window": 5, "max_window_layers": 1},
        },
        variants=(
            {"sliding_window": 7, "use_sliding_window": False, "max_window_layers": 0},
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0},
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2},
            {"sliding_window": 7, "use_sliding_window": True},
            {"sliding_window": 7, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2},
        ),
        switches=(
            ("b", {"use_sliding_window": False}),
            ("b", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}),
            ("c", {"layer_types": ["sliding_attention"] * 2}),
        ),
        refused=(
            *[({"rope_parameters": {"rope_type": kind}}, kind) for kind in ("mrope", "proportional")],
            ({"use_sliding_window": True, "layer_types": "sliding_attention"}, "a list of 2 names"),
        ),
        buffers=_BUFFERS,
    ),
    FamilyCases(
        name="qwen3",
        minimal=_OTHERS,
        shapes={
            "a": {**heads(6, 2, 20), "attention_bias": True, "tie_word_embeddings": True},
            "b": {**heads(8, 2, 12), **_SLIDING, "sliding_window": 9},
            "c": {**heads(3, 3, 24), "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "d": {**heads(4, 2), "use_sliding_window": True, "sliding_window": 9, "layer_types": _MIXED}
            | {"rope_parameters": YARN},
        },
        variants=(
            {"sliding_window": 7, "use_sliding_window": True, "layer_types": ["full_attention"] * 2},
            {"sliding_window": 7, "use_sliding_window": True, "layer_types": _MIXED},
            {"use_sliding_window": True, "max_window_layers": 0, "rope_theta": 1e6},
            {"head_dim": 20, "attention_bias": True, "num_key_value_heads": 8},
        ),
        switches=(
            ("b", {"sliding_window": 10}),
            ("c", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
            ("d", {"layer_types": ["full_attention"] * 2}),
        ),
        refused=(
            ({"use_sliding_window": True, "layer_types": ["full_attention"]}, "a list of 2 names"),
            ({"use_sliding_window": True, "layer_types": ["chunked_attention"] * 2}, "'chunked_attention'.*not supp"),
        ),
        buffers=_BUFFERS,
        is_written=True,
    ),
)
