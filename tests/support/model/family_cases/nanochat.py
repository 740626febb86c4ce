"""Cases of nanochat."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import LLAMA, SCALED, YARN, FamilyCases, heads

_MINIMAL: dict[str, Any] = {**LLAMA, "num_attention_heads": 6, "vocab_size": 99}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}

FAMILIES = (
    FamilyCases(
        name="nanochat",
        minimal=_MINIMAL,
        shapes={
            "a": {**heads(6, 2, 20), "attention_bias": True},
            "b": {**heads(4, 1), "final_logit_softcapping": None, "tie_word_embeddings": True, "rms_norm_eps": 1e-1},
            "c": {**heads(3, 3, 24), "final_logit_softcapping": 2.0, "hidden_act": "gelu", "rope_parameters": SCALED},
            "d": {**heads(4, 2), "num_hidden_layers": 3, "rope_parameters": YARN},
        },
        variants=(
            {"rope_theta": 5e5, "rope_scaling": None, "num_key_value_heads": None, "final_logit_softcapping": None},
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "num_key_value_heads": 2, "head_dim": 20},
            {"rope_parameters": _DEFAULT, "attention_bias": True, "tie_word_embeddings": True},
        ),
        switches=(
            ("a", {"rope_parameters": {**_DEFAULT, "rope_theta": 100.0}}),
            ("b", {"rms_norm_eps": 1e-6}),
            ("b", {"final_logit_softcapping": 15.0}),
            ("c", {"final_logit_softcapping": None}),
            ("d", {"rope_parameters": _DEFAULT}),
        ),
        refused=(
            ({"final_logit_softcapping": 0}, "^final_logit_softcapping cannot be 0"),
            ({"rope_parameters": {**_DEFAULT, "partial_rotary_factor": 0.5}}, "^partial_rotary_factor 0.5"),
            ({"rms_norm_eps": "1e-6"}, "^rms_norm_eps cannot be '1e-6'"),
        ),
        buffers=("model.rotary_emb.inv_freq",),
    ),
)
