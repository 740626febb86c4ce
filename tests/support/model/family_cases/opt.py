"""Cases of opt."""

from __future__ import annotations

from tests.support.model.family_cases import FamilyCases

_SIZES = {"num_hidden_layers": 2, "ffn_dim": 80, "max_position_embeddings": 128}

FAMILIES = (
    FamilyCases(
        name="opt",
        minimal={**_SIZES, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 99},
        shapes={
            "a": {**_SIZES, "hidden_size": 80, "num_attention_heads": 4},
            "b": {**_SIZES, "hidden_size": 36, "num_attention_heads": 3, "enable_bias": False}
            | {"tie_word_embeddings": False, "activation_function": "gelu"},
            "c": {**_SIZES, "hidden_size": 48, "num_attention_heads": 2, "layer_norm_elementwise_affine": False}
            | {"num_hidden_layers": 3, "word_embed_proj_dim": 48},
        },
        variants=(
            {"word_embed_proj_dim": 48, "do_layer_norm_before": True, "_remove_final_layer_norm": False},
            {"word_embed_proj_dim": None, "activation_dropout": 0.0, "prefix": "</s>", "torch_dtype": "float16"},
            {"enable_bias": False, "layer_norm_elementwise_affine": False, "tie_word_embeddings": False},
        ),
        switches=(("a", {"activation_function": "silu"}), ("b", {"activation_function": "relu"})),
        refused=(
            ({"word_embed_proj_dim": 24}, "^word_embed_proj_dim 24 is not supported, only None or 48"),
            ({"do_layer_norm_before": False}, "^do_layer_norm_before False is not supported, only True"),
            ({"_remove_final_layer_norm": True}, "^_remove_final_layer_norm True is not supported"),
            ({"enable_bias": None}, "^enable_bias cannot be None"),
            ({"num_attention_heads": 5}, r"^hidden_size \(48\) must be a multiple of num_attention_heads \(5\)"),
        ),
        neutral={
            "dropout": "of training",
            "layerdrop": "of training",
            "init_std": "of training",
        },
        activation_key="activation_function",
    ),
)
