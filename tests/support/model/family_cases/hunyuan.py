"""Cases of hunyuan_v1_dense."""

from __future__ import annotations

from typing import Any

from tests.support.model.family_cases import LLAMA, SCALED, YARN, FamilyCases, heads

_ALPHA: dict[str, Any] = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
_PUBLISHED = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "factor": 1.0}

FAMILIES = (
    FamilyCases(
        name="hunyuan_v1_dense",
        minimal={**LLAMA, "num_attention_heads": 4, "head_dim": 12, "vocab_size": 99},
        shapes={
            "a": {**heads(6, 2, 20), "rope_parameters": _ALPHA, "attention_bias": True},
            "b": {**heads(4, 1, 16), "tie_word_embeddings": True, "rope_parameters": {**_ALPHA, "alpha": 50}},
            "c": {**heads(3, 3, 24), "rms_norm_eps": 1e-3, "hidden_act": "gelu", "rope_parameters": SCALED},
            "d": {**heads(8, 2, 12), "rope_parameters": YARN},
            "e": {**heads(4, 4, 12), "rope_parameters": _DYNAMIC},
        },
        variants=(
            {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, **_PUBLISHED}},
            {"rope_theta": 5e5, "rope_scaling": {"type": "dynamic", "alpha": 2, "factor": 1.0}},
            {"rope_scaling": {"type": "linear", "alpha": 1000.0, "factor": 4.0}},
            {"rope_scaling": {"type": "dynamic", "alpha": 0, "factor": 2.0}},
            {"rope_scaling": {"type": "dynamic", "alpha": None, "factor": 2.0}, "num_key_value_heads": 2},
            {"rope_scaling": None, "use_qk_norm": True, "attention_head_dim": 12, "torch_dtype": "bfloat16"},
            {"attention_bias": True, "tie_word_embeddings": True, "num_experts": 1, "eod_token_id": 5},
        ),
        switches=(
            ("a", {"rope_parameters": {**_ALPHA, "alpha": 900.0}}),
            ("a", {"rope_parameters": _DYNAMIC}),
            ("b", {"rope_parameters": {**_ALPHA, "alpha": 50, "rope_type": "default"}}),
            ("c", {"rms_norm_eps": 1e-5}),
            ("d", {"rope_parameters": {**YARN, "factor": 2.0}}),
        ),
        refused=(
            ({"rope_scaling": {"type": "dynamic", "alpha": "9"}}, "^alpha of the rope scaling cannot be '9'"),
            ({"rope_scaling": {"type": "dynamic", "alpha": -1}}, "^alpha of the rope scaling cannot be -1"),
            ({"rope_scaling": {"type": "dynamic", "alpha": 1e15}}, "^rope_theta with alpha of the rope scaling"),
            ({"rope_scaling": {"type": "dynamic", "alpha": 9}, "head_dim": 2}, "^alpha .* a head_dim above 2, not 2"),
            ({"use_qk_norm": False}, "^use_qk_norm False"),
            ({"mlp_bias": True}, "^mlp_bias True"),
            ({"use_cla": True}, "^use_cla True"),
            ({"num_experts": 8}, "^num_experts 8"),
            ({"attention_head_dim": 16}, "^attention_head_dim 16"),
            ({"attention_bias": "no"}, "^attention_bias cannot be 'no'"),
            ({"partial_rotary_factor": 0.5}, "^partial_rotary_factor 0.5"),
        ),
        neutral={"eod_token_id": "an id, which the generation configuration names"},
        buffers=("model.rotary_emb.inv_freq",),
    ),
)
