"""Cases of gpt_oss."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import EXPERTS_NEUTRAL, LLAMA, SCALED, YARN, FamilyCases, heads

_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
_MINIMAL: dict[str, Any] = {**LLAMA, **_EXPERTS, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99}
_TYPES = ["sliding_attention", "full_attention"]

FAMILIES = (
    FamilyCases(
        name="gpt_oss",
        minimal=_MINIMAL,
        shapes={
            "a": {**heads(4, 2, 20), **_EXPERTS, "sliding_window": 9, "rope_parameters": {**YARN, "truncate": False}},
            "b": {**heads(6, 2, 12), "num_local_experts": 9, "num_experts_per_tok": 4, "intermediate_size": 36}
            | {"layer_types": _TYPES[::-1], "sliding_window": 17, "rope_parameters": SCALED, "rms_norm_eps": 1e-3},
            "c": {**heads(4, 1, 16), **_EXPERTS, "layer_types": ["full_attention"] * 2, "attention_bias": False}
            | {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        },
        variants=(
            {"rope_scaling": {**YARN, "truncate": False}, "rope_theta": 150_000, "max_position_embeddings": 131_072},
            {"rope_parameters": SCALED, "sliding_window": None, "layer_types": ["full_attention"] * 2},
            {"num_experts": 5, "num_local_experts": 6},
            {"swiglu_limit": 7.0, "hidden_act": "silu", "torch_dtype": "bfloat16", "layer_types": None},
            {"sliding_window": 5, "head_dim": 16, "attention_bias": False, "tie_word_embeddings": True},
        ),
        switches=(
            ("a", {"sliding_window": 10}),
            ("a", {"layer_types": _TYPES[::-1]}),
            ("a", {"num_experts_per_tok": 3}),
            ("a", {"rope_parameters": {**YARN, "truncate": True}}),
            ("b", {"rms_norm_eps": 1e-6}),
            ("b", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ),
        refused=(
            ({"swiglu_limit": 8.0}, "^swiglu_limit 8.0 is not supported, only 7.0"),
            ({"swiglu_alpha": 1.0}, "^swiglu_alpha 1.0 is not supported, only 1.702"),
            ({"hidden_act": "gelu"}, "^hidden_act 'gelu' is not supported, only 'silu'"),
            ({"attention_bias": None}, "^attention_bias cannot be None"),
            ({"num_local_experts": 0}, "^num_local_experts cannot be 0"),
            ({"num_experts_per_tok": 9}, "^chosen of the experts"),
            ({"sliding_window": 0}, "^sliding_window cannot be 0"),
            ({"layer_types": ["chunked_attention"] * 2}, "'chunked_attention'.*not supported"),
            ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'.*not supported.*MXFP4"),
        ),
        neutral=EXPERTS_NEUTRAL,
        buffers=("model.rotary_emb.inv_freq",),
        activation_key="",
    ),
)
