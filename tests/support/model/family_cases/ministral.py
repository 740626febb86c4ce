"""Cases of ministral.

transformers 5.23 makes no such model without head_dim, and computes nothing if sliding_window is null.
"""

from __future__ import annotations

from tests.support.model.family_cases import LLAMA, SCALED, YARN, FamilyCases, heads

_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
_MIXED = ["full_attention", "sliding_attention"]

FAMILIES = (
    FamilyCases(
        name="ministral",
        minimal={**LLAMA, "num_attention_heads": 8, "head_dim": 6, "vocab_size": 99},
        shapes={
            "a": {**heads(6, 2, 20), "sliding_window": 9, "layer_types": _MIXED, "tie_word_embeddings": True},
            "b": {**heads(4, 4, 12), "sliding_window": 17, "rope_parameters": SCALED},
            "c": {**heads(8, 1, 24), "layer_types": ["full_attention"] * 2, "rms_norm_eps": 1e-3, "hidden_act": "gelu"}
            | {"rope_parameters": YARN},
        },
        variants=(
            {"sliding_window": None},
            {"sliding_window": 7, "rope_theta": 1e8, "torch_dtype": "bfloat16"},
            {"sliding_window": 7, "layer_types": _MIXED, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"layer_types": ["full_attention"] * 2, "num_key_value_heads": 4, "head_dim": 20},
            {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
        ),
        switches=(
            ("a", {"sliding_window": 8}),
            ("a", {"layer_types": _MIXED[::-1]}),
            ("b", {"sliding_window": 18}),
            ("b", {"rope_parameters": _DEFAULT}),
            ("c", {"rms_norm_eps": 1e-6}),
            ("c", {"hidden_act": "silu"}),
            ("c", {"rope_parameters": _DEFAULT}),
        ),
        refused=(
            ({"sliding_window": 0}, "^sliding_window cannot be 0"),
            ({"sliding_window": "9"}, "^sliding_window cannot be '9'"),
            ({"layer_types": ["full_attention"]}, "a list of 2 names"),
            ({"layer_types": ["chunked_attention"] * 2}, "'chunked_attention'.*not supp"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ),
        buffers=("model.layers.0.self_attn.rotary_emb.inv_freq",),
    ),
)
