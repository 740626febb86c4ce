"""Cases of phi."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import LLAMA, SCALED, YARN, FamilyCases, heads

_MINIMAL: dict[str, Any] = {**LLAMA, "num_attention_heads": 4, "vocab_size": 99}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}

FAMILIES = (
    FamilyCases(
        name="phi",
        minimal=_MINIMAL,
        shapes={
            "a": {**heads(6, 2, 20), "layer_norm_eps": 1e-3},
            "b": {**heads(4, 4), "rope_parameters": {**_DEFAULT, "partial_rotary_factor": 1.0}}
            | {"tie_word_embeddings": True, "hidden_act": "relu"},
            "c": {**heads(3, 3, hidden_size=120), "rope_parameters": {**SCALED, "partial_rotary_factor": 0.4}},
            "d": {**heads(4, 1, 24), "rope_parameters": YARN, "num_hidden_layers": 3},
        },
        variants=(
            {"partial_rotary_factor": 0.5, "rope_theta": 10_000.0, "rope_scaling": None, "num_key_value_heads": None},
            {"partial_rotary_factor": 1.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "hidden_act": "gelu"},
            {"rope_parameters": {**_DEFAULT, "partial_rotary_factor": 0.5}, "num_key_value_heads": 2},
            {"tie_word_embeddings": True, "torch_dtype": "float16", "head_dim": 20},
        ),
        switches=(
            ("a", {"layer_norm_eps": 1e-5}),
            ("b", {"rope_parameters": {**_DEFAULT, "partial_rotary_factor": 0.5}}),
            ("c", {"rope_parameters": {**_DEFAULT, "partial_rotary_factor": 0.4}}),
            ("d", {"hidden_act": "silu"}),
        ),
        refused=(
            ({"qk_layernorm": True}, "^qk_layernorm True is not supported"),
            ({"layer_norm_eps": -1}, "^layer_norm_eps cannot be -1"),
            ({"partial_rotary_factor": 1.5}, "^partial_rotary_factor cannot be 1.5"),
        ),
        buffers=("model.layers.0.self_attn.rotary_emb.inv_freq",),
    ),
)
