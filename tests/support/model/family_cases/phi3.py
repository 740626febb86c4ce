"""Cases of phi3."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import LLAMA, FamilyCases, heads

_MINIMAL: dict[str, Any] = {**LLAMA, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99, "pad_token_id": 0}


def longrope(pairs: int, **more: Any) -> dict[str, Any]:
    """Rotation of so many pairs of dimensions; its short and long factors differ in every pair."""
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(pairs)], "long_factor": [1.5 + i for i in range(pairs)]}
    return {"rope_type": "longrope", "rope_theta": 1e4, **factors, **more}


_ORIGINAL = {"original_max_position_embeddings": 32}
_SU = {key: longrope(8)[key] for key in ("short_factor", "long_factor")}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}

FAMILIES = (
    FamilyCases(
        name="phi3",
        minimal=_MINIMAL,
        shapes={
            "a": {**heads(4, 4), "sliding_window": 17, "original_max_position_embeddings": 128},
            "b": {**heads(6, 2), "hidden_size": 144, "rope_parameters": {**_DEFAULT, "partial_rotary_factor": 0.75}}
            | {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
            # The served context decides about the factors: here it is no longer than the original one,
            "c": {**heads(4, 2), "original_max_position_embeddings": 128, "rope_parameters": longrope(6)},
            # and here it is longer. transformers looks at the sequence: those of these tests have 17 tokens or more.
            "d": {**heads(6, 1), "hidden_size": 96, "original_max_position_embeddings": 16, "rms_norm_eps": 1e-3}
            | {"rope_parameters": longrope(6, partial_rotary_factor=0.75)},
        },
        variants=(
            {"rope_theta": 5e5, "num_key_value_heads": None, "sliding_window": 7},
            {"rope_scaling": {"type": "su", **_SU, **_ORIGINAL}, **_ORIGINAL, "rope_theta": 5e5},
            {"rope_scaling": {"type": "yarn", **_SU}, **_ORIGINAL},
            {"rope_scaling": {"type": "longrope", **_SU}, "original_max_position_embeddings": 128},
            {"rope_scaling": {"type": "longrope", **_SU}},
            {"rope_scaling": {"rope_type": "longrope", **_SU, "factor": 3.0}, "original_max_position_embeddings": 64},
            {"rope_parameters": longrope(8, attention_factor=1.25), "original_max_position_embeddings": 64},
            {"rope_parameters": longrope(8, original_max_position_embeddings=32)},
            {"partial_rotary_factor": 0.75},
            {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "longrope", **longrope(4)}},
            {"rope_parameters": {**longrope(6), "partial_rotary_factor": 0.75}, "partial_rotary_factor": 0.5},
            {"tie_word_embeddings": True, "torch_dtype": "bfloat16", "num_key_value_heads": 1, "rope_scaling": None},
        ),
        switches=(
            ("a", {"sliding_window": 18}),
            ("a", {"sliding_window": None}),
            ("b", {"rope_parameters": {**_DEFAULT, "partial_rotary_factor": 0.5}}),
            ("b", {"hidden_act": "silu"}),
            ("c", {"rope_parameters": longrope(6, short_factor=[1.0] * 6)}),
            ("c", {"original_max_position_embeddings": 64}),
            ("d", {"rope_parameters": longrope(6, long_factor=[1.0] * 6, partial_rotary_factor=0.75)}),
            ("d", {"rope_parameters": longrope(6, attention_factor=1.0, partial_rotary_factor=0.75)}),
            ("d", {"original_max_position_embeddings": 32}),
            ("d", {"rms_norm_eps": 1e-6}),
        ),
        refused=(
            ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "^type 'linear' is not supported.*'longrope'"),
            ({"rope_parameters": {"rope_type": "llama3"}}, "^rope_type 'llama3' is not supported"),
            ({"rope_scaling": {"type": "su"}}, "short_factor"),
            ({"rope_scaling": {"type": "su", **_SU, "long_factor": None}}, "long_factor.*must be a list"),
            ({"rope_scaling": {"type": "su", **_SU, "long_factor": ["2"] * 8}}, "long_factor"),
            ({"rope_scaling": {"type": "su", **_SU, "short_factor": [1.0] * 7}}, "8 short_factors.*not 7|not 7 and 8"),
            ({"rope_scaling": {"type": "su", "short_factor": [1.0] * 7, "long_factor": [1.0] * 7}}, "8 short_factors"),
            ({"partial_rotary_factor": "0.5"}, "^partial_rotary_factor"),
            ({"partial_rotary_factor": 0.2}, "its dim must be even"),
            ({"original_max_position_embeddings": None}, "^original_max_position_embeddings cannot be None"),
            ({"original_max_position_embeddings": "32"}, "^original_max_position_embeddings cannot be '32'"),
            ({"sliding_window": 0}, "^sliding_window cannot be 0"),
            ({"attention_bias": True}, "^attention_bias True"),
            ({"lm_head_bias": True}, "^lm_head_bias True"),
        ),
        buffers=("model.layers.0.self_attn.rotary_emb.inv_freq",),
    ),
)
