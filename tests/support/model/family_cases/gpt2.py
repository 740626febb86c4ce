"""Cases of gpt2, gpt_bigcode."""

from __future__ import annotations

from tests.support.model.family_cases import FamilyCases

_MINIMAL = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 99}

FAMILIES = (
    FamilyCases(
        name="gpt2",
        minimal=_MINIMAL,
        shapes={
            "a": {"n_embd": 80, "n_layer": 2, "n_head": 4, "n_positions": 128, "activation_function": "gelu_new"},
            "b": {"n_embd": 36, "n_layer": 2, "n_head": 3, "n_positions": 128, "n_inner": 50}
            | {"activation_function": "relu", "tie_word_embeddings": False},
            "c": {"n_embd": 48, "n_layer": 3, "n_head": 2, "n_positions": 128, "n_inner": 100}
            | {"activation_function": "gelu", "layer_norm_epsilon": 1e-3},
        },
        variants=(
            {"n_inner": None, "n_ctx": 128, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
            {"n_inner": 50, "activation_function": "relu", "tie_word_embeddings": False},
        ),
        switches=(("a", {"activation_function": "gelu"}), ("c", {"layer_norm_epsilon": 1e-5})),
        refused=(
            ({"activation_function": "quick_gelu"}, "'quick_gelu' is not supported"),
            ({"scale_attn_weights": False}, "scale_attn_weights False"),
            ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
            ({"add_cross_attention": True}, "add_cross_attention"),
            ({"n_head": 5}, r"n_embd \(48\) must be a multiple of n_head \(5\)"),
        ),
        neutral={
            "reorder_and_upcast_attn": "the precision of attention, which is float32 here",
            **{
                f"summary_{name}": "of classifiers"
                for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
            },
        },
        buffers=("h.0.attn.bias", "transformer.h.11.attn.bias", "transformer.h.0.attn.masked_bias"),
        activation_key="activation_function",
        is_written=True,
    ),
    FamilyCases(
        name="gpt_bigcode",
        minimal=_MINIMAL,
        shapes={
            "a": {"n_embd": 80, "n_layer": 2, "n_head": 4, "n_positions": 128, "layer_norm_epsilon": 1e-3},
            "b": {"n_embd": 36, "n_layer": 2, "n_head": 3, "n_positions": 128, "n_inner": 50}
            | {"multi_query": False, "activation_function": "relu", "tie_word_embeddings": False},
            "c": {"n_embd": 72, "n_layer": 3, "n_head": 6, "n_positions": 128, "n_inner": 100}
            | {"activation_function": "gelu"},
        },
        variants=(
            {"n_inner": None, "multi_query": True, "attention_softmax_in_fp32": False, "pad_key_length": True},
            {"n_inner": 50, "multi_query": False, "activation_function": "relu", "tie_word_embeddings": False},
        ),
        switches=(("a", {"layer_norm_epsilon": 1e-5}), ("c", {"activation_function": "relu"})),
        refused=(
            ({"scale_attn_weights": False}, "^scale_attn_weights False is not supported"),
            ({"add_cross_attention": True, "multi_query": False}, "^add_cross_attention True is not supported"),
            ({"multi_query": 1}, "^multi_query cannot be 1"),
            ({"n_head": 5}, r"^n_embd \(48\) must be a multiple of n_head \(5\)"),
        ),
        neutral={
            "attention_softmax_in_fp32": "the precision of attention, which is float32 here",
            "scale_attention_softmax_in_fp32": "the precision of attention, which is float32 here",
            "num_key_value_heads": "follows from multi_query",
        },
        buffers=("h.0.attn.bias", "transformer.h.11.attn.bias", "transformer.h.0.attn.masked_bias", "transformer.bias"),
        activation_key="activation_function",
    ),
)
