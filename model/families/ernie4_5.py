"""ernie4_5: llama with an interleaved rotation, and biases everywhere or nowhere."""

from __future__ import annotations

import re

from model.config import LayerKind, ModelConfig
from model.families.layouts import rotation_interleaved
from model.families.llama import KEYS, NAMES, read_sizes
from model.families.rope import read_whole_rope
from model.families.spec import FamilySpec, Raw, activation, require_values


def _read(raw: Raw) -> ModelConfig:
    require_values(raw, compression_ratio=1.0)
    keys = {**KEYS, "qkv_bias": "use_bias"}
    sizes = read_sizes(raw, keys, n_kv_heads=2, head_dim=128, norm_eps=1e-5, tied_head=True, qkv_bias=False)
    return ModelConfig(
        **sizes,
        layer_kinds=(LayerKind(rope=read_whole_rope(raw, theta=500_000.0)),),
        activation=activation(raw.get("hidden_act", "silu")),
        out_bias=sizes["qkv_bias"],
        mlp_bias=sizes["qkv_bias"],
    )


ERNIE4_5 = FamilySpec(
    name="ernie4_5",
    models="ERNIE 4.5 0.3B",
    architecture="Ernie4_5ForCausalLM",
    read=_read,
    names=NAMES,
    layout=rotation_interleaved,
    prefix="model.",
    ignored=re.compile(r".*rotary_emb\.inv_freq"),
)
