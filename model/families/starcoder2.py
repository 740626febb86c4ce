"""starcoder2: LayerNorm, biases, grouped queries, and a window."""

from __future__ import annotations

import re

from model.config import LayerKind, ModelConfig, check_field
from model.families.llama import KEYS, NAMES, read_sizes
from model.families.rope import read_whole_rope
from model.families.spec import FamilySpec, Raw, activation, require_values

_NAMES = {**NAMES, "blocks.N.mlp.up": "model.layers.N.mlp.c_fc", "blocks.N.mlp.down": "model.layers.N.mlp.c_proj"}
_KEYS = {**KEYS, "norm_eps": "norm_epsilon", "qkv_bias": "use_bias"}


def _read(raw: Raw) -> ModelConfig:
    require_values(raw, mlp_type="default", norm_type="layer_norm")
    sizes = read_sizes(raw, _KEYS, n_kv_heads=2, norm_eps=1e-5, qkv_bias=True, tied_head=True)
    window = raw.get("sliding_window")
    check_field("window", window, "sliding_window", LayerKind)
    return ModelConfig(
        **sizes,
        norm="layernorm",
        norm_bias=True,
        layer_kinds=(LayerKind(window=window, rope=read_whole_rope(raw)),),
        activation=activation(raw.get("hidden_act", "gelu_pytorch_tanh")),
        gated=False,
        out_bias=sizes["qkv_bias"],
        mlp_bias=sizes["qkv_bias"],
    )


STARCODER2 = FamilySpec(
    name="starcoder2",
    models="StarCoder 2, 3B to 15B",
    architecture="Starcoder2ForCausalLM",
    read=_read,
    names=_NAMES,
    prefix="model.",
    ignored=re.compile(r".*rotary_emb\.inv_freq"),
)
