"""Cases of seed_oss."""

from __future__ import annotations

from tests.support.model.family_cases import LLAMA, SCALED, YARN, FamilyCases, heads

_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}

FAMILIES = (
    FamilyCases(
        name="seed_oss",
        minimal={**LLAMA, "num_attention_heads": 8, "vocab_size": 99},
        shapes={
            "a": {**heads(6, 2, 20), "attention_out_bias": True, "tie_word_embeddings": True},
            "b": {**heads(4, 4, 12), "attention_bias": False, "mlp_bias": True, "rope_parameters": SCALED},
            "c": {**heads(8, 1, 24), "rms_norm_eps": 1e-3, "hidden_act": "gelu", "rope_parameters": YARN},
        },
        variants=(
            {"rope_theta": 1e7, "rope_scaling": {"rope_type": "default"}, "attention_out_bias": False},
            {"num_key_value_heads": None, "head_dim": None},
            {"num_key_value_heads": 2, "head_dim": 20, "attention_bias": False, "attention_out_bias": True},
            {"torch_dtype": "bfloat16", "tie_word_embeddings": True, "mlp_bias": True, "pretraining_tp": 1},
        ),
        switches=(
            ("b", {"rope_parameters": _DEFAULT}),
            ("c", {"rms_norm_eps": 1e-6}),
            ("c", {"hidden_act": "silu"}),
            ("c", {"rope_parameters": _DEFAULT}),
        ),
        refused=(
            ({"attention_bias": None}, "^attention_bias cannot be None"),
            ({"attention_out_bias": "no"}, "^attention_out_bias cannot be 'no'"),
            ({"mlp_bias": 1}, "^mlp_bias cannot be 1"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ),
        neutral={"residual_dropout": "of training"},
        buffers=("model.layers.0.self_attn.rotary_emb.inv_freq",),
    ),
)
