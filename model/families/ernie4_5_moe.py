"""ernie4_5_moe: ernie4_5 with experts after the first layers, a bias of their choice, and shared experts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated

from msgspec import Meta

from model.config import Count, LayerKind, ModelConfig, Size, check_value
from model.families.experts import EXPERT_NAMES, FUSED_NAMES, read_experts, with_experts
from model.families.layouts import rotation_interleaved, with_leading_axis
from model.families.llama import KEYS, NAMES, read_sizes
from model.families.rope import read_whole_rope
from model.families.spec import FamilySpec, Raw, TensorMapping, activation, read_layers, require_values

_BIAS = "blocks.N.mlp.choice_bias"
_SHARED = "model.layers.N.mlp.shared_experts"
_NAMES = {
    **NAMES,
    **EXPERT_NAMES,
    "head_bias": "lm_head.bias",
    _BIAS: "model.layers.N.mlp.moe_statics.e_score_correction_bias",
    "blocks.N.mlp.shared.up": (f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj"),
    "blocks.N.mlp.shared.down": f"{_SHARED}.down_proj",
}
_KEYS = {"count": ("num_experts", "moe_num_experts"), "chosen": ("num_experts_per_tok", "moe_k")}
_PLACES = {
    "moe_layer_start_index": (1, Count),
    "moe_layer_end_index": (-1, Annotated[int, Meta(ge=-1)]),
    "moe_layer_interval": (1, Size),
    "moe_num_shared_experts": (2, Count),
}
"""Defaults and annotations."""


def _read(raw: Raw) -> ModelConfig:
    require_values(raw, moe_norm_min=1e-12)
    keys = {**KEYS, "qkv_bias": "use_bias"}
    sizes = read_sizes(raw, keys, n_kv_heads=4, norm_eps=1e-5, tied_head=True, qkv_bias=False)
    places = {key: raw.get(key, default) for key, (default, _) in _PLACES.items()}
    for key, value in places.items():
        check_value(value, _PLACES[key][1], key)
    first, last, step, n_shared = places.values()
    last, rope = sizes["n_layers"] - 1 if last == -1 else last, read_whole_rope(raw, theta=500_000.0)

    def kind(layer: int) -> LayerKind:
        return LayerKind(rope=rope, mlp="experts" if first <= layer <= last and (layer + 1) % step == 0 else "dense")

    defaults = {"count": 64, "chosen": 6, "width": 1536}
    experts = read_experts(raw, _KEYS, defaults, normalized=True, choice_bias=True)
    experts = replace(experts, shared_width=n_shared * experts.width)
    layers = with_experts(read_layers(sizes["n_layers"], kind), experts)
    has_dense = n_shared > 0 or "mlp_width" not in layers
    return ModelConfig(
        **{**sizes, **layers},
        activation=activation(raw.get("hidden_act", "silu")),
        out_bias=sizes["qkv_bias"],
        mlp_bias=sizes["qkv_bias"] and has_dense,
        head_bias=sizes["qkv_bias"],
    )


def _layout(config: ModelConfig, mapping: TensorMapping) -> TensorMapping:
    return rotation_interleaved(config, with_leading_axis(mapping, "choice_bias"))


ERNIE4_5_MOE = FamilySpec(
    name="ernie4_5_moe",
    models="ERNIE 4.5 21B-A3B",
    architecture="Ernie4_5_MoeForCausalLM",
    read=_read,
    names=_NAMES,
    fused={**FUSED_NAMES, _BIAS: "model.layers.N.mlp.gate.moe_statics.e_score_correction_bias"},
    layout=_layout,
    prefix="model.",
    ignored=re.compile(r"(model\.)?mtp.+|.*rotary_emb\.inv_freq"),
)
