"""Cases of olmoe."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import EXPERTS_NEUTRAL, LLAMA, SCALED, YARN, FamilyCases, heads

_MINIMAL: dict[str, Any] = {**LLAMA, "num_attention_heads": 4, "vocab_size": 99, "num_experts": 6}
_MINIMAL |= {"num_experts_per_tok": 2}

FAMILIES = (
    FamilyCases(
        name="olmoe",
        minimal=_MINIMAL,
        shapes={
            "a": {**heads(4, 4), "num_experts": 6, "num_experts_per_tok": 2, "rms_norm_eps": 1e-3},
            "b": {**heads(6, 2), "num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True}
            | {"attention_bias": True, "rope_parameters": SCALED, "intermediate_size": 20},
            "c": {**heads(4, 1), "num_experts": 9, "num_experts_per_tok": 1, "rope_parameters": YARN}
            | {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        },
        variants=(
            {"clip_qkv": None, "rope_theta": 5e5, "rope_scaling": None, "num_key_value_heads": None},
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "attention_bias": True, "norm_topk_prob": True},
            {"tie_word_embeddings": True, "torch_dtype": "bfloat16", "num_key_value_heads": 2},
            {"num_local_experts": 6},
            {"num_local_experts": 5, "num_experts": 6},
        ),
        switches=(
            ("a", {"num_experts_per_tok": 1}),
            ("a", {"norm_topk_prob": True}),
            ("b", {"norm_topk_prob": False}),
            ("b", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
            ("c", {"hidden_act": "silu"}),
            ("c", {"rope_parameters": {**YARN, "factor": 2.0}}),
        ),
        refused=(
            ({"clip_qkv": 8.0}, "^clip_qkv 8.0 is not supported, only None"),
            ({"num_experts": 0}, "^num_experts cannot be 0"),
            ({"num_experts": 10**6}, "^num_experts cannot be 1000000"),
            ({"num_experts_per_tok": 7}, r"^chosen of the experts \(7\) must not be above count \(6\)"),
            ({"norm_topk_prob": None}, "^norm_topk_prob cannot be None"),
            ({"intermediate_size": 0}, "^intermediate_size cannot be 0"),
            ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ),
        neutral=EXPERTS_NEUTRAL,
        buffers=("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
    ),
)
