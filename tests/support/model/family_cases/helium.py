"""Cases of helium."""

from __future__ import annotations

from tests.support.model.family_cases import LLAMA, SCALED, YARN, FamilyCases, heads

FAMILIES = (
    FamilyCases(
        name="helium",
        minimal={**LLAMA, "num_attention_heads": 20, "hidden_size": 80, "head_dim": 4, "vocab_size": 99},
        shapes={
            "a": {**heads(6, 2, 20), "hidden_size": 120, "attention_bias": True, "tie_word_embeddings": True},
            "b": {**heads(4, 1, 12), "mlp_bias": True, "rope_parameters": {**YARN, "rope_theta": 1e5}},
            "c": {**heads(3, 3, 16), "rms_norm_eps": 1e-3, "hidden_act": "gelu", "rope_parameters": SCALED},
        },
        variants=(
            {"rope_theta": 1e4, "rope_scaling": None},
            {"rope_parameters": {"rope_theta": 7e3}, "num_key_value_heads": 4, "torch_dtype": "bfloat16"},
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "tie_word_embeddings": True},
            {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 5, "rms_norm_eps": 1e-5},
        ),
        switches=(
            ("a", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
            ("b", {"rope_parameters": {**YARN, "factor": 2.0, "rope_theta": 1e5}}),
            ("c", {"rms_norm_eps": 1e-8}),
            ("c", {"hidden_act": "silu"}),
        ),
        refused=(
            ({"mlp_bias": None}, "^mlp_bias cannot be None"),
            ({"attention_bias": 0}, "^attention_bias cannot be 0"),
            ({"partial_rotary_factor": 0.5}, "^partial_rotary_factor 0.5"),
            ({"num_key_value_heads": 3}, "multiple"),
        ),
        buffers=("model.rotary_emb.inv_freq",),
    ),
)
