"""helium: llama with an interleaved rotation."""

from __future__ import annotations

import re

from model.config import LayerKind, ModelConfig
from model.families.layouts import rotation_interleaved
from model.families.llama import KEYS, NAMES, read_sizes
from model.families.rope import read_whole_rope
from model.families.spec import FamilySpec, Raw, activation

_KEYS = {**KEYS, "qkv_bias": "attention_bias", "mlp_bias": "mlp_bias"}


def _read(raw: Raw) -> ModelConfig:
    defaults = {"n_kv_heads": 20, "head_dim": 128, "norm_eps": 1e-8, "qkv_bias": False, "mlp_bias": False}
    return ModelConfig(
        **read_sizes(raw, _KEYS, **defaults),
        layer_kinds=(LayerKind(rope=read_whole_rope(raw, theta=100_000.0)),),
        activation=activation(raw.get("hidden_act", "silu")),
    )


HELIUM = FamilySpec(
    name="helium",
    models="Helium 1, 2B",
    architecture="HeliumForCausalLM",
    read=_read,
    names=NAMES,
    layout=rotation_interleaved,
    prefix="model.",
    ignored=re.compile(r".*rotary_emb\.inv_freq"),
)
