"""Cases of gpt_neox."""

from __future__ import annotations

from tests.support.model.family_cases import LLAMA, LLAMA3, FamilyCases

FAMILIES = (
    FamilyCases(
        name="gpt_neox",
        minimal={**LLAMA, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99},
        shapes={
            "a": {**LLAMA, "hidden_size": 80, "num_attention_heads": 4, "rotary_pct": 1.0},
            "b": {**LLAMA, "hidden_size": 96, "num_attention_heads": 4, "use_parallel_residual": False}
            | {"rotary_pct": 0.25, "tie_word_embeddings": True, "hidden_act": "relu"},
            "c": {**LLAMA, "hidden_size": 36, "num_attention_heads": 3, "attention_bias": False, "rotary_pct": 0.5}
            | {"rope_scaling": {"type": "linear", "factor": 2.0}, "rotary_emb_base": 777, "hidden_act": "gelu_new"},
            "d": {**LLAMA, "num_attention_heads": 3, "use_parallel_residual": True, "rotary_pct": 0.25}
            | {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}},
        },
        variants=(
            {"rotary_pct": 1.0, "rotary_emb_base": 20_000},
            {"rotary_pct": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}, "hidden_act": "gelu_fast"},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5}},
            {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True},
        ),
        switches=(("a", {"use_parallel_residual": False}), ("b", {"use_parallel_residual": True})),
        refused=(
            ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "'ntk' is not supported.*linear, llama3"),
            ({"hidden_act": None}, "activation None"),
            ({"num_attention_heads": 5}, "hidden_size.*multiple of num_attention_heads"),
            ({"rotary_pct": 0.2}, "its dim must be even"),
            ({"rotary_pct": [1]}, r"rotary_pct .* cannot be \[1\]: it must be a number from 0 to 1"),
            ({"rotary_pct": "1"}, "rotary_pct .* must be a number"),
            ({"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor.* cannot be 2"),
        ),
        neutral={"classifier_dropout": "of classifiers", "is_decoder": "whether a cache is possible"},
        buffers=tuple(
            f"{prefix}layers.3.attention.{buffer}"
            for prefix in ("", "gpt_neox.")
            for buffer in ("bias", "masked_bias", "rotary_emb.inv_freq")
        ),
    ),
)
