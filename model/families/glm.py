"""glm and glm4: partial interleaved rotation, gate and up in one tensor; glm4 has norms of outputs as well."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from model.config import LayerKind, ModelConfig, RopeFactor, check_value
from model.families.layouts import rotation_interleaved
from model.families.llama import KEYS, NAMES, read_sizes
from model.families.rope import read_rope, read_rotated_dim
from model.families.spec import FamilySpec, Raw, activation

_NAMES = {**NAMES, "blocks.N.mlp.up": "model.layers.N.mlp.gate_up_proj"}
_SANDWICH = {
    **_NAMES,
    "blocks.N.norm_attention_output": "model.layers.N.post_self_attn_layernorm",
    "blocks.N.norm_mlp_output": "model.layers.N.post_mlp_layernorm",
}
_KEYS = {**KEYS, "qkv_bias": "attention_bias"}


def _read(raw: Raw, **dialect: Any) -> ModelConfig:
    sizes = read_sizes(raw, _KEYS, n_kv_heads=2, head_dim=128, norm_eps=1.5625e-7, qkv_bias=True)
    check_value(raw.get("partial_rotary_factor", 0.5), RopeFactor, "partial_rotary_factor")
    rotated = read_rotated_dim(raw, sizes["head_dim"], default=0.5)
    return ModelConfig(
        **sizes,
        layer_kinds=(LayerKind(rope=read_rope(raw, rotated)),),
        activation=activation(raw.get("hidden_act", "silu")),
        **dialect,
    )


_family = partial(
    FamilySpec, layout=rotation_interleaved, prefix="model.", ignored=re.compile(r".*rotary_emb\.inv_freq")
)
GLM = _family(name="glm", models="GLM-4 9B", architecture="GlmForCausalLM", read=_read, names=_NAMES)
GLM4 = _family(
    name="glm4",
    models="GLM-4-0414 9B, GLM-Z1 9B",
    architecture="Glm4ForCausalLM",
    read=partial(_read, norm_position="sandwich"),
    names=_SANDWICH,
)
