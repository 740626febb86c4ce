"""Cases of mellum."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import EXPERTS_NEUTRAL, LLAMA, YARN, FamilyCases, heads

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MINIMAL: dict[str, Any] = {**LLAMA, **_EXPERTS, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99}
_TYPES = ["sliding_attention", "full_attention"]
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
_LOCAL = {"rope_type": "default", "rope_theta": 5e3}
_ROPES = {"full_attention": YARN, "sliding_attention": _LOCAL}

FAMILIES = (
    FamilyCases(
        name="mellum",
        minimal=_MINIMAL,
        shapes={
            "a": {**heads(4, 2, 20), **_EXPERTS, "layer_types": _TYPES, "sliding_window": 9, "rope_parameters": _ROPES},
            "b": {**heads(6, 2, 12), **_EXPERTS, "mlp_layer_types": ["dense", "sparse"], "norm_topk_prob": False}
            | {"attention_bias": True, "rope_parameters": _ROPES, "hidden_act": "gelu"},
            "c": {**heads(4, 1, 16), **_EXPERTS, "layer_types": _TYPES[::-1], "sliding_window": 17}
            | {"mlp_layer_types": ["sparse", "dense"], "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
        },
        variants=(
            {"layer_types": ["sliding_attention"] * 2, "rope_parameters": _ROPES},
            {"layer_types": _TYPES, "mlp_layer_types": None, "sliding_window": 5, "head_dim": 24},
            {"sliding_window": None, "torch_dtype": "bfloat16", "num_nextn_predict_layers": 1},
            {"mlp_layer_types": ["dense"] * 2, "attention_bias": True, "norm_topk_prob": False},
            {"num_local_experts": 4, "rope_parameters": {"full_attention": YARN, "sliding_attention": _DEFAULT}},
        ),
        switches=(
            ("a", {"sliding_window": 10}),
            ("a", {"layer_types": _TYPES[::-1]}),
            ("a", {"rope_parameters": {**_ROPES, "full_attention": _DEFAULT}}),
            ("a", {"rope_parameters": {**_ROPES, "sliding_attention": _DEFAULT}}),
            ("a", {"norm_topk_prob": False}),
            ("b", {"norm_topk_prob": True}),
            ("b", {"hidden_act": "silu"}),
            ("c", {"num_experts_per_tok": 3}),
            ("c", {"rms_norm_eps": 1e-6}),
        ),
        refused=(
            ({"rope_scaling": YARN}, "^rope_scaling .* is not supported, only None"),
            ({"rope_theta": 1e4}, "^rope_theta 10000.0 is not supported, only None"),
            ({"rope_parameters": YARN}, "^rope_parameters must name .*full_attention and sliding_attention"),
            ({"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor"),
            ({"layer_types": _TYPES, "sliding_window": None}, "^sliding_window cannot be None"),
            ({"layer_types": ["chunked_attention"] * 2}, "'chunked_attention'.*not supported"),
            (
                {"mlp_layer_types": ["sparse"]},
                "^mlp_layer_types must be a list of 2 names, each of them",
            ),
            ({"mlp_layer_types": ["sparse", "moe"]}, "^mlp_layer_types must be a list of 2 names"),
            ({"num_experts": 0}, "^num_experts cannot be 0"),
            ({"norm_topk_prob": None}, "^norm_topk_prob cannot be None"),
        ),
        neutral={
            **EXPERTS_NEUTRAL,
            **dict.fromkeys(
                ("num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
                "layers that predict later tokens, which transformers does not compute",
            ),
        },
        buffers=("model.rotary_emb.inv_freq", "mtp.layers.0.input_layernorm.weight"),
    ),
)
