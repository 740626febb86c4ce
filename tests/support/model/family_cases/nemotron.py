"""Cases of nemotron."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import LLAMA, LLAMA3, SCALED, FamilyCases, heads

_MINIMAL: dict[str, Any] = {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 99}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}

FAMILIES = (
    FamilyCases(
        name="nemotron",
        minimal=_MINIMAL,
        shapes={
            "a": {**heads(6, 2, 20), "attention_bias": True, "norm_eps": 1e-3},
            "b": {**heads(4, 1), "mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "silu"}
            | {"rope_parameters": {**_DEFAULT, "partial_rotary_factor": 1.0}},
            "c": {**heads(3, 3, 24), "rope_parameters": {**SCALED, "partial_rotary_factor": 0.25}},
            "d": {**heads(4, 2), "num_hidden_layers": 3}
            | {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}},
        },
        variants=(
            {"partial_rotary_factor": 0.5, "rope_theta": 10_000, "rope_scaling": None, "head_dim": None},
            {"partial_rotary_factor": 1.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "head_dim": 20},
            {"rope_parameters": {**_DEFAULT, "partial_rotary_factor": 0.25}, "head_dim": 24},
            {"rope_parameters": _DEFAULT, "mlp_bias": True, "norm_eps": 1e-6, "num_key_value_heads": 2},
        ),
        switches=(
            ("a", {"norm_eps": 1e-5}),
            ("b", {"rope_parameters": {**_DEFAULT, "partial_rotary_factor": 0.5}}),
            ("c", {"rope_parameters": {**SCALED, "partial_rotary_factor": 0.5}}),
            ("c", {"hidden_act": "relu"}),
        ),
        refused=(
            ({"partial_rotary_factor": 2}, "^partial_rotary_factor cannot be 2"),
            ({"mlp_bias": 1}, "^mlp_bias cannot be 1"),
            ({"norm_eps": 0}, "^norm_eps cannot be 0"),
            ({"rope_scaling": {"type": "mrope"}}, "'mrope' is not supported"),
        ),
        buffers=("model.layers.0.self_attn.rotary_emb.inv_freq",),
    ),
)
