"""Cases of granite, granitemoehybrid."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import EXPERTS_NEUTRAL, LLAMA, LLAMA3, YARN, FamilyCases, heads

_MINIMAL: dict[str, Any] = {**LLAMA, "num_attention_heads": 4, "vocab_size": 99}
_SCALES = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.5,
}
_HYBRID = {
    "shared_intermediate_size": 80,
    "num_local_experts": 0,
    "layer_types": ["full_attention"] * 2,
    "mamba_n_heads": 4,
}
_ROPE = {"position_embedding_type": "rope"}

FAMILIES = (
    FamilyCases(
        name="granite",
        minimal=_MINIMAL,
        shapes={
            "a": {**heads(6, 2, 20), **_SCALES, "attention_bias": True, "tie_word_embeddings": True},
            "b": {**heads(4, 1), **_SCALES, "mlp_bias": True, "logits_scaling": 8, "hidden_act": "gelu"}
            | {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}},
            "c": {**heads(3, 3, 24), "attention_multiplier": 0.2, "rms_norm_eps": 1e-3, "rope_parameters": YARN},
        },
        variants=(
            {"rope_theta": 5e5, "num_key_value_heads": None, "torch_dtype": "bfloat16"},
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1e7},
            {**_SCALES, "embedding_multiplier": 12, "logits_scaling": 16},
            {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
            {"partial_rotary_factor": None},
        ),
        switches=(
            *[("a", {key: 1.0}) for key in _SCALES],
            ("b", {"logits_scaling": 7.5}),
            ("b", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
            ("c", {"rms_norm_eps": 1e-6}),
            ("c", {"attention_multiplier": 24**-0.5}),
        ),
        refused=(
            *[({key: value}, f"^{key} cannot be") for key in _SCALES for value in (0, "width", None)],
            ({"logits_scaling": 5e-324}, "^the inverse of logits_scaling cannot be inf"),
            ({"partial_rotary_factor": 0.5}, "^partial_rotary_factor 0.5"),
            ({"attention_bias": None}, "^attention_bias cannot be None"),
            ({"mlp_bias": "no"}, "^mlp_bias cannot be 'no'"),
            ({"num_hidden_layers": "2"}, "^num_hidden_layers cannot be '2'"),
        ),
        buffers=("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
    ),
    FamilyCases(
        name="granitemoehybrid",
        minimal={**_MINIMAL, **_HYBRID},
        shapes={
            "a": {**heads(6, 2, 20), **_HYBRID, **_SCALES, **_ROPE, "attention_bias": True},
            "b": {**heads(4, 1), **_HYBRID, **_SCALES, "position_embedding_type": "nope", "tie_word_embeddings": True},
            "c": {**heads(3, 3, 24), **_HYBRID, **_ROPE, "attention_multiplier": 0.2, "shared_intermediate_size": 50}
            | {"rope_parameters": YARN, "hidden_act": "relu"},
            "d": {**heads(4, 2, 20), **_HYBRID, **_SCALES, **_ROPE, "intermediate_size": 24, "num_local_experts": 5},
        },
        variants=(
            {**_ROPE, "rope_theta": 1e7, "rope_scaling": None},
            {"position_embedding_type": None, "layer_types": ["attention"] * 2},
            {"position_embedding_type": "nope", "layer_types": ["attention", "full_attention"]},
            {**_SCALES, **_ROPE, "attention_bias": True, "num_experts_per_tok": 0, "torch_dtype": "bfloat16"},
            {"num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 16},
        ),
        switches=(
            *[("a", {key: 1.0}) for key in _SCALES],
            ("a", {"position_embedding_type": None}),
            ("b", {"position_embedding_type": "rope"}),
            ("c", {"rope_parameters": {**YARN, "factor": 2.0}}),
            ("d", {"num_experts_per_tok": 3}),
        ),
        refused=(
            ({"num_local_experts": None}, "^num_local_experts cannot be None"),
            ({"num_local_experts": 4, "num_experts_per_tok": 5}, "^chosen of the experts"),
            ({"num_local_experts": 4, "intermediate_size": 0}, "^intermediate_size cannot be 0"),
            ({"layer_types": ["attention", "mamba"]}, "^layer_types has 'mamba', which is not supported"),
            ({"layer_types": ["linear_attention"] * 2}, "^layer_types has 'linear_attention'"),
            ({"layer_types": [["attention"], "attention"]}, r"^layer_types has \['attention'\]"),
            ({"layer_types": None}, "^layer_types must be a list of 2 names"),
            ({"layer_types": ["attention"]}, "^layer_types must be a list of 2 names"),
            ({"position_embedding_type": "alibi"}, "^position_embedding_type 'alibi'"),
            ({"shared_intermediate_size": "80"}, "^shared_intermediate_size cannot be '80'"),
            ({"shared_intermediate_size": None}, "^shared_intermediate_size cannot be None"),
            ({"logits_scaling": 0}, "^logits_scaling cannot be 0"),
            ({**_ROPE, "partial_rotary_factor": 0.5}, "^partial_rotary_factor 0.5"),
        ),
        neutral={
            **EXPERTS_NEUTRAL,
            **dict.fromkeys(
                (
                    *[f"mamba_{key}" for key in ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand")],
                    *[f"mamba_{key}" for key in ("chunk_size", "conv_bias", "proj_bias")],
                    "time_step_limit",
                ),
                "of Mamba layers, which are refused",
            ),
        },
        buffers=("model.rotary_emb.inv_freq",),
    ),
)
