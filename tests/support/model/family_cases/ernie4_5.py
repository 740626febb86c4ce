"""Cases of ernie4_5."""

from __future__ import annotations

from tests.support.model.family_cases import LLAMA, LLAMA3, YARN, FamilyCases, heads

FAMILIES = (
    FamilyCases(
        name="ernie4_5",
        minimal={**LLAMA, "num_attention_heads": 4, "vocab_size": 99},
        shapes={
            "a": {**heads(6, 2, 20), "use_bias": True},
            "b": {**heads(4, 1, 16), "tie_word_embeddings": False, "rope_parameters": YARN},
            "c": {**heads(3, 3, 24), "rms_norm_eps": 1e-3, "hidden_act": "relu"}
            | {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}},
        },
        variants=(
            {"rope_theta": 1e4, "rope_scaling": None, "num_key_value_heads": None, "head_dim": None},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7e3}, "torch_dtype": "bfloat16"},
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "compression_ratio": 1.0},
            {"use_bias": True, "tie_word_embeddings": False, "head_dim": 20, "num_key_value_heads": 4},
        ),
        switches=(
            ("a", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
            ("b", {"rope_parameters": {**YARN, "factor": 2.0}}),
            ("c", {"rms_norm_eps": 1e-5}),
            ("c", {"hidden_act": "silu"}),
        ),
        refused=(
            ({"use_bias": None}, "^use_bias cannot be None"),
            ({"use_bias": "yes"}, "^use_bias cannot be 'yes'"),
            ({"compression_ratio": 2.0}, "^compression_ratio 2.0"),
            ({"partial_rotary_factor": 0.5}, "^partial_rotary_factor 0.5"),
            ({"head_dim": 15}, "its dim must be even"),
        ),
        buffers=("model.rotary_emb.inv_freq",),
    ),
)
