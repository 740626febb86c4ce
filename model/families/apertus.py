"""apertus: xIELU with numbers of its own in each layer, and norms of query and key heads."""

from __future__ import annotations

import re
from dataclasses import replace

from model.config import LayerKind, ModelConfig
from model.families.llama import KEYS, NAMES, read_sizes
from model.families.rope import read_whole_rope, rope_parameters
from model.families.spec import FamilySpec, Raw, TensorMapping, activation, require_values

_XIELU = "model.layers.N.mlp.act_fn"
_NAMES = {
    **NAMES,
    "blocks.N.norm_attention": "model.layers.N.attention_layernorm",
    "blocks.N.norm_mlp": "model.layers.N.feedforward_layernorm",
    "blocks.N.mlp.up": "model.layers.N.mlp.up_proj",
    "blocks.N.mlp.activation": (f"{_XIELU}.alpha_p", f"{_XIELU}.alpha_n"),
}
_CONSTANTS = {"beta": 0.5, "eps": -1e-6}
"""The slope at 0, and the largest argument of expm1, in whose place the Decoder has 0."""
_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPE |= {"original_max_position_embeddings": 8192, "rope_theta": 12e6}
"""Of a config.json without one."""


def _read(raw: Raw) -> ModelConfig:
    require_values(raw, qk_norm=True, post_norm=False, mlp_bias=False)
    sizes = read_sizes(raw, {**KEYS, "qkv_bias": "attention_bias"}, norm_eps=1e-5, qkv_bias=False)
    act = raw.get("hidden_act", "xielu")
    if not rope_parameters(raw) and raw.get("rope_parameters") is None:
        raw = {**raw, "rope_parameters": _ROPE}
    return ModelConfig(
        **sizes,
        out_bias=sizes["qkv_bias"],
        qk_norm="head",
        layer_kinds=(LayerKind(rope=read_whole_rope(raw, theta=12e6)),),
        activation="xielu" if act == "xielu" else activation(act),
        gated=False,
    )


def _with_constants(_config: ModelConfig, mapping: TensorMapping) -> TensorMapping:
    if not mapping.target.endswith(".mlp.activation"):
        return mapping
    module = mapping.source[0][0].rpartition(".")[0]
    return replace(mapping, constants=tuple((f"{module}.{name}", number) for name, number in _CONSTANTS.items()))


APERTUS = FamilySpec(
    name="apertus",
    models="Apertus 8B",
    architecture="ApertusForCausalLM",
    read=_read,
    names=_NAMES,
    layout=_with_constants,
    prefix="model.",
    ignored=re.compile(r".*rotary_emb\.inv_freq"),
)
