"""Cases of gptj."""

from __future__ import annotations

from tests.support.model.family_cases import FamilyCases

_SIZES = {"n_layer": 2, "n_positions": 128}

FAMILIES = (
    FamilyCases(
        name="gptj",
        minimal={**_SIZES, "n_embd": 256, "n_head": 4, "vocab_size": 99},
        shapes={
            "a": {**_SIZES, "n_embd": 80, "n_head": 4, "rotary_dim": 8, "layer_norm_epsilon": 1e-3},
            "b": {**_SIZES, "n_embd": 72, "n_head": 3, "rotary_dim": 24, "n_inner": 100, "tie_word_embeddings": True},
            "c": {**_SIZES, "n_embd": 144, "n_head": 2, "activation_function": "relu", "n_layer": 3},
        },
        variants=(
            {"rotary_dim": 32, "n_inner": None, "rotary": True, "scale_attn_weights": True},
            {"rotary_dim": 64, "n_inner": 50, "activation_function": "gelu", "torch_dtype": "float16"},
            {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-6},
        ),
        switches=(
            ("a", {"rotary_dim": 10}),
            ("a", {"layer_norm_epsilon": 1e-5}),
            ("b", {"rotary_dim": 12}),
            ("c", {"activation_function": "gelu"}),
        ),
        refused=(
            ({"rotary_dim": None}, "^rotary_dim cannot be None"),
            ({"rotary_dim": "64"}, "^rotary_dim cannot be '64'"),
            ({"rotary_dim": 65}, "its dim must be even and at most head_dim"),
            ({"rotary_dim": 128}, "its dim must be even and at most head_dim"),
            ({"n_head": 5}, r"^n_embd \(256\) must be a multiple of n_head \(5\)"),
            ({"n_inner": -1}, "^n_inner cannot be -1"),
        ),
        buffers=("transformer.h.0.attn.bias", "h.0.attn.masked_bias", "transformer.h.3.attn.embed_positions"),
        activation_key="activation_function",
    ),
)
