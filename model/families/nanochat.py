"""nanochat: norms without weights, one of them after the embedding; squared ReLU; heads rotated the other way round."""

from __future__ import annotations

import re

from model.config import LayerKind, ModelConfig
from model.families.layouts import rotation_reversed
from model.families.llama import KEYS, NAMES, read_sizes
from model.families.rope import read_whole_rope
from model.families.spec import FamilySpec, Raw, activation

_NAMES = {
    **{module: name for module, name in NAMES.items() if "norm" not in module},
    "blocks.N.mlp.up": "model.layers.N.mlp.fc1",
    "blocks.N.mlp.down": "model.layers.N.mlp.fc2",
}
_KEYS = {**KEYS, "qkv_bias": "attention_bias", "logit_soft_cap": "final_logit_softcapping"}


def _read(raw: Raw) -> ModelConfig:
    sizes = read_sizes(raw, _KEYS, qkv_bias=False, logit_soft_cap=15.0)
    return ModelConfig(
        **sizes,
        norm_weight=False,
        embedding_norm=True,
        qk_norm="head",
        qk_norm_after_rope=True,
        layer_kinds=(LayerKind(rope=read_whole_rope(raw)),),
        activation=activation(raw.get("hidden_act", "relu2")),
        gated=False,
        out_bias=sizes["qkv_bias"],
    )


NANOCHAT = FamilySpec(
    name="nanochat",
    models="nanochat",
    architecture="NanoChatForCausalLM",
    read=_read,
    names=_NAMES,
    layout=rotation_reversed,
    prefix="model.",
    ignored=re.compile(r".*rotary_emb\.inv_freq"),
)
