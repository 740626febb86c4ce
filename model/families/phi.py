"""phi: phi-1, phi-1.5 and phi-2: a parallel residual with one norm, partly rotary heads, and biases everywhere."""

from __future__ import annotations

import re

from model.config import LayerKind, ModelConfig
from model.families.llama import KEYS, NAMES, read_sizes
from model.families.rope import read_rope, read_rotated_dim
from model.families.spec import FamilySpec, Raw, activation, require_values

_NAMES = {
    **NAMES,
    "head_bias": "lm_head.bias",
    "norm": "model.final_layernorm",
    "blocks.N.attention.out": "model.layers.N.self_attn.dense",
    "blocks.N.mlp.up": "model.layers.N.mlp.fc1",
    "blocks.N.mlp.down": "model.layers.N.mlp.fc2",
}


def _read(raw: Raw) -> ModelConfig:
    require_values(raw, qk_layernorm=False)
    sizes = read_sizes(raw, {**KEYS, "norm_eps": "layer_norm_eps"}, norm_eps=1e-5)
    rope = read_rope(raw, read_rotated_dim(raw, sizes["head_dim"], default=0.5))
    return ModelConfig(
        **sizes,
        norm="layernorm",
        norm_bias=True,
        parallel_residual=True,
        shared_norm=True,
        layer_kinds=(LayerKind(rope=rope),),
        activation=activation(raw.get("hidden_act", "gelu_new")),
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


PHI = FamilySpec(
    name="phi",
    models="Phi-1, Phi-1.5, Phi-2",
    architecture="PhiForCausalLM",
    read=_read,
    names=_NAMES,
    prefix="model.",
    ignored=re.compile(r".*rotary_emb\.inv_freq"),
)
