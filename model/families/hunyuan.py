"""hunyuan_v1_dense: queries and keys are normed after the rotation, with a base that alpha makes larger (NTK-aware)."""

from __future__ import annotations

import re
from dataclasses import replace

from model.config import ConfigError, LayerKind, ModelConfig, Rope, RopeFactor, check_field, check_value
from model.families.llama import KEYS, NAMES, read_sizes
from model.families.rope import read_whole_rope, rope_parameters
from model.families.spec import FamilySpec, Raw, activation, require_values

_NAMES = {
    **NAMES,
    "blocks.N.attention.q_norm": "model.layers.N.self_attn.query_layernorm",
    "blocks.N.attention.k_norm": "model.layers.N.self_attn.key_layernorm",
}


def _read(raw: Raw) -> ModelConfig:
    require_values(raw, use_qk_norm=True, mlp_bias=False, use_cla=False, num_experts=(1, None))
    sizes = read_sizes(raw, {**KEYS, "qkv_bias": "attention_bias"}, norm_eps=1e-5, qkv_bias=False)
    require_values(raw, attention_head_dim=(sizes["head_dim"], None))
    return ModelConfig(
        **sizes,
        layer_kinds=(LayerKind(rope=_read_rope(raw, sizes["head_dim"])),),
        qk_norm="head",
        qk_norm_after_rope=True,
        activation=activation(raw.get("hidden_act", "silu")),
        out_bias=sizes["qkv_bias"],
    )


def _read_rope(raw: Raw, head_dim: int) -> Rope:
    """A `dynamic` scaling with alpha does not depend on the length: it is NTK-aware, with a larger base."""
    rope, parameters = read_whole_rope(raw), rope_parameters(raw)
    alpha, kind = parameters.get("alpha"), parameters.get("rope_type") or parameters.get("type")
    if kind != "dynamic" or not alpha:
        return rope
    check_value(alpha, RopeFactor, "alpha of the rope scaling")
    if head_dim <= 2:
        raise ConfigError(f"alpha of the rope scaling needs a head_dim above 2, not {head_dim}")
    theta = rope.theta * alpha ** (head_dim / (head_dim - 2))
    check_field("theta", theta, "rope_theta with alpha of the rope scaling", Rope)
    return replace(rope, theta=theta)


HUNYUAN_DENSE = FamilySpec(
    name="hunyuan_v1_dense",
    models="Hunyuan 0.5B to 7B",
    architecture="HunYuanDenseV1ForCausalLM",
    read=_read,
    names=_NAMES,
    prefix="model.",
    ignored=re.compile(r".*rotary_emb\.inv_freq"),
)
