"""Cases of stablelm."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import LLAMA, LLAMA3, SCALED, FamilyCases, heads

_MINIMAL: dict[str, Any] = {**LLAMA, "hidden_size": 256, "num_attention_heads": 32, "vocab_size": 99}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}

FAMILIES = (
    FamilyCases(
        name="stablelm",
        minimal=_MINIMAL,
        shapes={
            "a": {**heads(6, 2, hidden_size=96), "use_qkv_bias": True, "layer_norm_eps": 1e-3},
            "b": {**heads(4, 1, hidden_size=80), "use_parallel_residual": True, "tie_word_embeddings": True}
            | {"rope_parameters": {**_DEFAULT, "partial_rotary_factor": 0.5}},
            "c": {**heads(3, 3, hidden_size=72), "hidden_act": "gelu", "rope_parameters": SCALED},
            "d": {**heads(4, 2), "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}}
            | {"partial_rotary_factor": 1.0, "num_hidden_layers": 3},
        },
        variants=(
            {"partial_rotary_factor": 0.25, "rope_theta": 10_000, "rope_scaling": None, "use_qkv_bias": True},
            {"partial_rotary_factor": 1.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {**_DEFAULT, "partial_rotary_factor": 0.5}, "use_parallel_residual": True},
            {"rope_parameters": _DEFAULT, "num_key_value_heads": 8, "layer_norm_eps": 1e-6},
        ),
        switches=(
            ("a", {"layer_norm_eps": 1e-5}),
            ("b", {"rope_parameters": {**_DEFAULT, "partial_rotary_factor": 0.2}}),
            ("c", {"rope_parameters": _DEFAULT}),
            ("c", {"hidden_act": "silu"}),
        ),
        refused=(
            ({"qk_layernorm": True}, "^qk_layernorm True is not supported, only False"),
            ({"partial_rotary_factor": "0.25"}, "^partial_rotary_factor cannot be '0.25'"),
            ({"num_attention_heads": 31, "num_key_value_heads": 31}, r"^hidden_size \(256\) must be a multiple of"),
            ({"head_dim": 16}, "^head_dim 16 is not supported, only None or 8"),
            ({"use_parallel_residual": None}, "^use_parallel_residual cannot be None"),
        ),
        buffers=("model.layers.0.self_attn.rotary_emb.inv_freq",),
    ),
)
