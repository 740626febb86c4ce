"""Cases of apertus."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import LLAMA, LLAMA3, SCALED, YARN, FamilyCases, heads

_MINIMAL: dict[str, Any] = {**LLAMA, "num_attention_heads": 4, "vocab_size": 99}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
_PUBLISHED = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64}

FAMILIES = (
    FamilyCases(
        name="apertus",
        minimal=_MINIMAL,
        shapes={
            "a": heads(6, 2, attention_bias=True),
            "b": {**heads(4, 1, 20), "tie_word_embeddings": True, "rms_norm_eps": 1e-3}
            | {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}},
            "c": {**heads(4, 4, 24), "num_hidden_layers": 3, "rope_parameters": YARN},
            "d": {**heads(3, 3), "hidden_act": "relu2", "rope_parameters": SCALED},
        },
        variants=(
            {"rope_scaling": {**_PUBLISHED, "rope_type": "llama3", "type": "llama3"}, "rope_theta": 12_000_000}
            | {"qk_norm": True, "post_norm": False, "mlp_bias": False},
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_scaling": None, "rope_theta": 5e5},
            {"rope_parameters": {}},
            {"rope_parameters": _DEFAULT, "num_key_value_heads": None, "attention_bias": True},
            {"rope_parameters": None, "num_key_value_heads": 2, "hidden_act": "gelu", "torch_dtype": "bfloat16"},
        ),
        switches=(
            ("a", {"rope_parameters": _DEFAULT}),
            ("b", {"rms_norm_eps": 1e-5}),
            ("b", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}}),
            ("d", {"hidden_act": "relu"}),
        ),
        refused=(
            ({"qk_norm": False}, "^qk_norm False is not supported"),
            ({"post_norm": True}, "^post_norm True is not supported"),
            ({"mlp_bias": True}, "^mlp_bias True is not supported"),
            ({"partial_rotary_factor": 0.5}, "^partial_rotary_factor"),
            ({"attention_bias": None}, "^attention_bias cannot be None"),
            ({"hidden_act": ["xielu"]}, "^activation .* is not supported"),
        ),
        buffers=("model.rotary_emb.inv_freq",),
    ),
)
