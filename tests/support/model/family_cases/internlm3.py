"""Cases of internlm3."""

from __future__ import annotations

from tests.support.model.family_cases import LLAMA, SCALED, YARN, FamilyCases, heads

_BIASES = {"attention_bias": True, "mlp_bias": True}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}

FAMILIES = (
    FamilyCases(
        name="internlm3",
        minimal={**LLAMA, "num_attention_heads": 4, "vocab_size": 99},
        shapes={
            "a": {**heads(6, 2, 20), **_BIASES, "tie_word_embeddings": True},
            "b": {**heads(4, 4, 12), "rope_parameters": SCALED},
            "c": {**heads(8, 1, 24), "rms_norm_eps": 1e-3, "hidden_act": "gelu", "rope_parameters": YARN},
        },
        variants=(
            {"rope_theta": 5e7, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}},
            {"qkv_bias": True, "bias": True, "torch_dtype": "bfloat16"},
            {"qkv_bias": False, "bias": False, **_BIASES},
            {"num_key_value_heads": None, "head_dim": None, **_BIASES},
            {"num_key_value_heads": 4, "head_dim": 20, "tie_word_embeddings": True, "bias": True, "qkv_bias": True},
        ),
        switches=(
            ("b", {"rope_parameters": _DEFAULT}),
            ("c", {"rms_norm_eps": 1e-6}),
            ("c", {"hidden_act": "silu"}),
            ("c", {"rope_parameters": _DEFAULT}),
        ),
        refused=(
            ({"qkv_bias": True, "bias": False}, "^qkv_bias and bias must be equal$"),
            ({"qkv_bias": True}, "^qkv_bias and mlp_bias must be equal$"),
            ({"attention_bias": True}, "^attention_bias and mlp_bias must be equal$"),
            ({"qkv_bias": "no"}, "^qkv_bias cannot be 'no'"),
            ({"bias": None}, "^bias cannot be None"),
            ({"mlp_bias": 1}, "^mlp_bias cannot be 1"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ),
        buffers=("model.layers.0.self_attn.rotary_emb.inv_freq",),
    ),
)
