"""Cases of qwen3_moe."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import EXPERTS_NEUTRAL, LLAMA, SCALED, YARN, FamilyCases, heads

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MINIMAL: dict[str, Any] = {**LLAMA, **_EXPERTS, "num_attention_heads": 4, "vocab_size": 99}

FAMILIES = (
    FamilyCases(
        name="qwen3_moe",
        minimal=_MINIMAL,
        shapes={
            "a": {**heads(4, 2, 20), **_EXPERTS, "norm_topk_prob": True, "use_sliding_window": True}
            | {"sliding_window": 17},
            "b": {**heads(6, 2), **_EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
            | {"attention_bias": True, "rope_parameters": YARN},
            "c": {**heads(4, 1), "num_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": 36}
            | {"hidden_act": "relu", "tie_word_embeddings": True, "rms_norm_eps": 1e-3, "norm_topk_prob": True},
            "d": {**heads(4, 4), **_EXPERTS, "mlp_only_layers": [0, 1], "rope_parameters": SCALED},
        },
        variants=(
            {"rope_theta": 1e6, "rope_scaling": None, "num_key_value_heads": 2, "mlp_only_layers": None},
            {"rope_scaling": {**YARN, "type": "yarn"}, "rope_theta": 1e6, "norm_topk_prob": True},
            {"use_sliding_window": True, "sliding_window": None, "decoder_sparse_step": 2, "max_window_layers": 1},
            {"torch_dtype": "bfloat16", "tie_word_embeddings": True, "attention_bias": True},
            {"mlp_only_layers": [1, 7], "use_sliding_window": True, "sliding_window": 9},
            {"num_local_experts": 4},
        ),
        switches=(
            ("a", {"sliding_window": 18}),
            ("a", {"norm_topk_prob": False}),
            ("a", {"num_experts_per_tok": 3}),
            ("b", {"rope_parameters": {**YARN, "factor": 2.0}}),
            ("c", {"hidden_act": "silu"}),
            ("c", {"rms_norm_eps": 1e-6}),
        ),
        refused=(
            ({"num_experts": 0}, "^num_experts cannot be 0"),
            ({"num_experts_per_tok": 0}, "^num_experts_per_tok cannot be 0"),
            ({"moe_intermediate_size": "24"}, "^moe_intermediate_size cannot be '24'"),
            ({"norm_topk_prob": "yes"}, "^norm_topk_prob cannot be 'yes'"),
            ({"decoder_sparse_step": 0}, "^decoder_sparse_step cannot be 0"),
            ({"mlp_only_layers": 3}, "^mlp_only_layers must be a list of the numbers of layers, not 3"),
            ({"mlp_only_layers": ["1"]}, "^mlp_only_layers must be a list"),
            ({"use_sliding_window": True, "sliding_window": 0}, "^sliding_window cannot be 0"),
            ({"num_hidden_layers": 10**9}, "at most 4096"),
            ({"partial_rotary_factor": 0.5}, "^partial_rotary_factor 0.5"),
        ),
        neutral=EXPERTS_NEUTRAL,
        buffers=("model.rotary_emb.inv_freq",),
    ),
)
