"""nemotron: LayerNorm by 1 + weight, squared ReLU, partly rotary heads."""

from __future__ import annotations

import re

from model.config import LayerKind, ModelConfig
from model.families.llama import KEYS, NAMES, read_sizes
from model.families.rope import read_rope, read_rotated_dim
from model.families.spec import FamilySpec, Raw, activation

_NAMES = {**NAMES, "blocks.N.mlp.up": "model.layers.N.mlp.up_proj"}
_KEYS = {**KEYS, "norm_eps": "norm_eps", "qkv_bias": "attention_bias", "mlp_bias": "mlp_bias"}


def _read(raw: Raw) -> ModelConfig:
    sizes = read_sizes(raw, _KEYS, norm_eps=1e-5, qkv_bias=False, mlp_bias=False)
    rope = read_rope(raw, read_rotated_dim(raw, sizes["head_dim"], default=0.5))
    return ModelConfig(
        **sizes,
        norm="layernorm",
        norm_bias=True,
        norm_offset=True,
        layer_kinds=(LayerKind(rope=rope),),
        activation=activation(raw.get("hidden_act", "relu2")),
        gated=False,
        out_bias=sizes["qkv_bias"],
    )


NEMOTRON = FamilySpec(
    name="nemotron",
    models="Minitron, Nemotron-4 of 4B and 8B",
    architecture="NemotronForCausalLM",
    read=_read,
    names=_NAMES,
    prefix="model.",
    ignored=re.compile(r".*rotary_emb\.inv_freq"),
)
