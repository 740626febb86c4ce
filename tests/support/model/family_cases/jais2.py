"""Cases of jais2."""

from __future__ import annotations

from tests.support.model.family_cases import LLAMA, SCALED, YARN, FamilyCases, heads

_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}

FAMILIES = (
    FamilyCases(
        name="jais2",
        minimal={**LLAMA, "num_attention_heads": 4, "vocab_size": 99},
        shapes={
            "a": {**heads(6, 2, 20), "attention_bias": False, "tie_word_embeddings": True},
            "b": {**heads(4, 4), "mlp_bias": False, "rope_parameters": SCALED},
            "c": {**heads(8, 1, 24), "layer_norm_eps": 1e-3, "hidden_act": "gelu", "rope_parameters": YARN},
        },
        variants=(
            {"rope_theta": 5e5, "rope_scaling": None, "num_key_value_heads": None, "head_dim": None},
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}, "attention_bias": False},
            {"num_key_value_heads": 2, "head_dim": 20, "mlp_bias": False, "torch_dtype": "bfloat16"},
            {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
        ),
        switches=(
            ("a", {"hidden_act": "silu"}),
            ("b", {"rope_parameters": _DEFAULT}),
            ("c", {"layer_norm_eps": 1e-6}),
            ("c", {"hidden_act": "relu2"}),
            ("c", {"rope_parameters": _DEFAULT}),
        ),
        refused=(
            ({"attention_bias": None}, "^attention_bias cannot be None"),
            ({"mlp_bias": "no"}, "^mlp_bias cannot be 'no'"),
            ({"layer_norm_eps": 0}, "^layer_norm_eps cannot be 0"),
            ({"hidden_act": "xielu"}, "'xielu' is not supported"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ),
        buffers=("model.layers.0.self_attn.rotary_emb.inv_freq",),
    ),
)
