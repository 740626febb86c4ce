"""Cases of ernie4_5_moe."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import EXPERTS_NEUTRAL, LLAMA, LLAMA3, YARN, FamilyCases, heads

_EXPERTS = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24}
_MINIMAL: dict[str, Any] = {**LLAMA, **_EXPERTS, "num_attention_heads": 4, "vocab_size": 99}

FAMILIES = (
    FamilyCases(
        name="ernie4_5_moe",
        minimal=_MINIMAL,
        shapes={
            "a": {**heads(6, 2, 20), **_EXPERTS, "use_bias": True},
            "b": {**heads(4, 1), **_EXPERTS, "tie_word_embeddings": False, "rope_parameters": YARN}
            | {"moe_num_shared_experts": 0, "moe_layer_start_index": 0},
            "c": {**heads(3, 3, 24), "moe_num_experts": 5, "moe_k": 3, "moe_intermediate_size": 20}
            | {"num_hidden_layers": 5, "moe_layer_interval": 2, "moe_layer_end_index": 2, "moe_num_shared_experts": 1}
            | {"rms_norm_eps": 1e-3, "hidden_act": "relu"}
            | {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}},
        },
        variants=(
            {"rope_theta": 1e4, "rope_scaling": None, "num_key_value_heads": 2, "moe_layer_end_index": 0},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7e3}, "torch_dtype": "bfloat16"},
            {"num_experts": 5, "moe_num_experts": 6, "num_experts_per_tok": 3, "moe_k": 2},
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "moe_norm_min": 1e-12, "moe_num_shared_experts": 3},
            {"use_bias": True, "tie_word_embeddings": False, "head_dim": 20, "num_key_value_heads": 4},
            {"use_bias": True, "moe_num_shared_experts": 0, "moe_layer_start_index": 0},
            {"num_hidden_layers": 6, "moe_layer_interval": 3, "moe_layer_start_index": 0, "moe_layer_end_index": 99},
        ),
        switches=(
            ("a", {"moe_k": 3}),
            ("a", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
            ("b", {"rope_parameters": {**YARN, "factor": 2.0}}),
            ("c", {"rms_norm_eps": 1e-5}),
            ("c", {"hidden_act": "silu"}),
        ),
        refused=(
            ({"use_bias": None}, "^use_bias cannot be None"),
            ({"moe_norm_min": 1e-3}, "^moe_norm_min 0.001 is not supported, only 1e-12"),
            ({"moe_num_experts": 0}, "^moe_num_experts cannot be 0"),
            ({"moe_k": None}, "^moe_k cannot be None"),
            ({"moe_num_shared_experts": -1}, "^moe_num_shared_experts cannot be -1"),
            ({"moe_num_shared_experts": 2**31 - 1}, "^shared_width of the experts cannot be"),
            ({"moe_layer_interval": 0}, "^moe_layer_interval cannot be 0"),
            ({"moe_layer_start_index": "1"}, "^moe_layer_start_index cannot be '1'"),
            ({"moe_layer_end_index": -2}, "^moe_layer_end_index cannot be -2"),
            ({"partial_rotary_factor": 0.5}, "^partial_rotary_factor 0.5"),
            ({"head_dim": 15}, "its dim must be even"),
        ),
        neutral=EXPERTS_NEUTRAL,
        buffers=("model.rotary_emb.inv_freq", "model.mtp_block.0.input_layernorm.weight"),
    ),
)
