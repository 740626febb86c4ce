"""Cases of arcee."""

from __future__ import annotations

from tests.support.model.family_cases import LLAMA, YARN, FamilyCases, heads

_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}

FAMILIES = (
    FamilyCases(
        name="arcee",
        minimal={**LLAMA, "num_attention_heads": 4, "vocab_size": 99},
        shapes={
            "a": {**heads(6, 2, 20), "attention_bias": True, "tie_word_embeddings": True},
            "b": {**heads(4, 4), "mlp_bias": True, "rope_parameters": YARN},
            "c": {**heads(8, 1, 24), "rms_norm_eps": 1e-3, "hidden_act": "silu"},
        },
        variants=(
            {"rope_theta": 5e5, "rope_scaling": None, "num_key_value_heads": None, "head_dim": None},
            {"rope_scaling": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "factor": 20.0}},
            {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False}},
            {"attention_bias": True, "mlp_bias": True, "torch_dtype": "bfloat16"},
        ),
        switches=(
            ("a", {"hidden_act": "silu"}),
            ("b", {"rope_parameters": _DEFAULT}),
            ("b", {"rope_parameters": {**YARN, "attention_factor": 1.0}}),
            ("c", {"rms_norm_eps": 1e-6}),
        ),
        refused=(
            ({"hidden_act": "xielu"}, "'xielu' is not supported"),
            ({"mlp_bias": "no"}, "^mlp_bias cannot be 'no'"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
            ({"rope_parameters": {**YARN, "factor": 0}}, "^factor of the rope scaling cannot be 0"),
        ),
        buffers=("model.layers.0.self_attn.rotary_emb.inv_freq",),
    ),
)
