"""Cases of starcoder2."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import LLAMA, LLAMA3, SCALED, FamilyCases, heads

_MINIMAL: dict[str, Any] = {**LLAMA, "num_attention_heads": 4, "vocab_size": 99}

FAMILIES = (
    FamilyCases(
        name="starcoder2",
        minimal=_MINIMAL,
        shapes={
            "a": {**heads(6, 2, 20), "sliding_window": 17, "norm_epsilon": 1e-3},
            "b": {**heads(4, 1), "use_bias": False, "tie_word_embeddings": False, "rope_parameters": SCALED},
            "c": {**heads(3, 3, 24), "sliding_window": 64, "hidden_act": "relu"}
            | {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}},
        },
        variants=(
            {"sliding_window": 4096, "rope_theta": 999999.44, "mlp_type": "default", "norm_type": "layer_norm"},
            {"sliding_window": 7, "rope_scaling": {"type": "linear", "factor": 2.0}, "num_key_value_heads": 1},
            {"sliding_window": None, "use_bias": False, "tie_word_embeddings": False, "head_dim": 20},
        ),
        switches=(
            ("a", {"sliding_window": 18}),
            ("a", {"norm_epsilon": 1e-5}),
            ("b", {"rope_parameters": {**SCALED, "factor": 2.0}}),
            ("c", {"sliding_window": None}),
        ),
        refused=(
            ({"sliding_window": 0}, "^sliding_window cannot be 0"),
            ({"mlp_type": "gated"}, "^mlp_type 'gated' is not supported"),
            ({"norm_type": "rms_norm"}, "^norm_type 'rms_norm' is not supported"),
            ({"use_bias": "no"}, "^use_bias cannot be 'no'"),
            ({"partial_rotary_factor": 0.5}, "^partial_rotary_factor 0.5"),
        ),
        neutral={"residual_dropout": "of training", "embedding_dropout": "of training"},
        buffers=("model.layers.0.self_attn.rotary_emb.inv_freq",),
    ),
)
