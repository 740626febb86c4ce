"""Cases of hyperclovax."""

from __future__ import annotations

from tests.support.model.family_cases import LLAMA, SCALED, YARN, FamilyCases, heads

_SCALES = {
    "embedding_multiplier": 10.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.5,
}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}

FAMILIES = (
    FamilyCases(
        name="hyperclovax",
        minimal={**LLAMA, "num_attention_heads": 4, "vocab_size": 99},
        shapes={
            "a": {
                **heads(6, 2, 20),
                **_SCALES,
                "residual_multiplier": 1.0,
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
            "b": {**heads(4, 1), **_SCALES, "mlp_bias": True, "use_post_norm": False, "hidden_act": "gelu"}
            | {"rope_parameters": SCALED},
            "c": {**heads(3, 3, 24), "logits_scaling": 3, "rms_norm_eps": 1e-3, "rope_parameters": YARN},
        },
        variants=(
            {"rope_theta": 1e8, "num_key_value_heads": None, "torch_dtype": "bfloat16", "rope_scaling": None},
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1e7, "head_dim": 20},
            {**_SCALES, "embedding_multiplier": 12, "logits_scaling": 16, "use_post_norm": False},
            {"attention_multiplier": None, "head_dim": None, "num_key_value_heads": 2, "tie_word_embeddings": True},
            {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.0078125},
        ),
        switches=(
            *[("b", {key: 1.0}) for key in _SCALES],
            *[("a", {key: 2.0}) for key in _SCALES if key != "residual_multiplier"],
            ("b", {"rope_parameters": _DEFAULT}),
            ("b", {"hidden_act": "silu"}),
            ("c", {"logits_scaling": 2.5}),
            ("c", {"rms_norm_eps": 1e-6}),
            ("c", {"attention_multiplier": 0.3}),
            ("c", {"rope_parameters": _DEFAULT}),
        ),
        refused=(
            *[({key: value, "use_post_norm": False}, f"^{key} cannot be") for key in _SCALES for value in (0, "width")],
            ({"residual_multiplier": 0.5}, "^residual_multiplier 0.5 is not supported, only 1.0$"),
            ({"logits_scaling": None}, "^logits_scaling cannot be None"),
            ({"use_post_norm": None}, "^use_post_norm cannot be None"),
            ({"use_post_norm": 1}, "^use_post_norm cannot be 1"),
            ({"attention_bias": None}, "^attention_bias cannot be None"),
            ({"mlp_bias": "no"}, "^mlp_bias cannot be 'no'"),
            ({"partial_rotary_factor": 0.5}, "^partial_rotary_factor 0.5"),
        ),
        buffers=("model.layers.0.self_attn.rotary_emb.inv_freq",),
    ),
)
