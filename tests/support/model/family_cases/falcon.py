"""Cases of falcon."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import LLAMA3, SCALED, FamilyCases

_SIZES: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 128}
_NEW = {"new_decoder_architecture": True}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}

FAMILIES = (
    FamilyCases(
        name="falcon",
        minimal={**_SIZES, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 99},
        shapes={
            "a": {**_SIZES, "hidden_size": 60, "num_attention_heads": 3, "layer_norm_epsilon": 1e-3},
            "b": {**_SIZES, "hidden_size": 48, "num_attention_heads": 4, "multi_query": False, "bias": True}
            | {"parallel_attn": False, "ffn_hidden_size": 80, "activation": "relu", "rope_parameters": SCALED},
            "c": {**_SIZES, **_NEW, "hidden_size": 120, "num_attention_heads": 6, "num_kv_heads": 2},
            "d": {**_SIZES, **_NEW, "hidden_size": 96, "num_attention_heads": 4, "num_ln_in_parallel_attn": 1}
            | {"num_kv_heads": 1, "tie_word_embeddings": False, "num_hidden_layers": 3}
            | {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}},
            "e": {**_SIZES, "hidden_size": 72, "num_attention_heads": 3, "multi_query": False, "bias": True},
        },
        variants=(
            {"alibi": False, "multi_query": True, "parallel_attn": True, "num_kv_heads": 4, "bias": False},
            {"new_decoder_architecture": False, "ffn_hidden_size": None, "torch_dtype": "bfloat16"},
            {"multi_query": False, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"parallel_attn": False, "tie_word_embeddings": False},
            {**_NEW, "num_kv_heads": None, "num_ln_in_parallel_attn": None},
            {**_NEW, "num_kv_heads": 2, "num_ln_in_parallel_attn": 2, "multi_query": False},
        ),
        switches=(
            ("a", {"layer_norm_epsilon": 1e-5}),
            ("a", {"rope_parameters": {**_DEFAULT, "rope_theta": 100.0}}),
            ("b", {"activation": "gelu"}),
            ("b", {"rope_parameters": _DEFAULT}),
            ("d", {"rope_parameters": _DEFAULT}),
        ),
        refused=(
            ({"alibi": True}, "^alibi True is not supported, only False"),
            ({**_NEW, "parallel_attn": False}, "^parallel_attn False is not supported, only True"),
            ({"num_ln_in_parallel_attn": 2}, "^num_ln_in_parallel_attn 2 is not supported, only None or 1"),
            ({**_NEW, "num_ln_in_parallel_attn": 3}, "^num_ln_in_parallel_attn 3 is not supported"),
            ({"multi_query": False, "num_kv_heads": 2}, "^num_kv_heads 2 is not supported, only None or 4"),
            ({"multi_query": None}, "^multi_query cannot be None"),
            ({**_NEW, "num_kv_heads": "2"}, "^num_kv_heads cannot be '2'"),
            ({**_NEW, "num_kv_heads": 0}, "^num_kv_heads cannot be 0"),
            ({"partial_rotary_factor": 0.5}, "^partial_rotary_factor 0.5"),
            ({"num_attention_heads": 5}, r"^hidden_size \(48\) must be a multiple of num_attention_heads \(5\)"),
        ),
        buffers=(
            "transformer.h.0.self_attention.rotary.inv_freq",
            "transformer.h.0.self_attention.maybe_rotary.inv_freq",
            "transformer.h.0.self_attention.rotary_emb.inv_freq",
        ),
        activation_key="activation",
    ),
)
