"""granite and granitemoehybrid: llama with factors of embeddings, scores, sums and logits."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from model.config import ConfigError, LayerKind, ModelConfig, Positive, check_field, check_value
from model.families.llama import KEYS, NAMES, read_sizes
from model.families.rope import read_whole_rope
from model.families.spec import FamilySpec, Raw, activation, read_fields, require_values

_HYBRID = {
    **NAMES,
    "blocks.N.mlp.up": "model.layers.N.shared_mlp.input_linear",
    "blocks.N.mlp.down": "model.layers.N.shared_mlp.output_linear",
}
_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}


def _read(raw: Raw, sizes: dict[str, Any], layer_kind: LayerKind, **dialect: Any) -> ModelConfig:
    bias = read_fields(raw, {"qkv_bias": "attention_bias"}, qkv_bias=False)["qkv_bias"]
    return ModelConfig(
        **sizes,
        **_read_scales(raw),
        layer_kinds=(layer_kind,),
        activation=activation(raw.get("hidden_act", "silu")),
        qkv_bias=bias,
        out_bias=bias,
        **dialect,
    )


def _read_scales(raw: Raw) -> dict[str, Any]:
    """The files divide logits by their factor."""
    scales = {field: raw.get(key, 1.0) for field, key in _SCALES.items()}
    for field, value in scales.items():
        check_value(value, Positive, _SCALES[field])
    scales["logit_scale"] = 1 / scales["logit_scale"]
    check_field("logit_scale", scales["logit_scale"], "the inverse of logits_scaling")
    return scales


def _read_granite(raw: Raw) -> ModelConfig:
    bias = read_fields(raw, {"mlp_bias": "mlp_bias"}, mlp_bias=False)
    return _read(raw, read_sizes(raw), LayerKind(rope=read_whole_rope(raw)), **bias)


def _read_hybrid(raw: Raw) -> ModelConfig:
    """Reads models whose layers are attention and one feed-forward network; experts and Mamba layers are refused."""
    require_values({"num_local_experts": raw.get("num_local_experts", 8)}, num_local_experts=0)
    require_values(raw, position_embedding_type=("rope", "nope", None))
    check_field("mlp_width", raw.get("shared_intermediate_size", 1024), "shared_intermediate_size")
    sizes = read_sizes(raw, {**KEYS, "mlp_width": "shared_intermediate_size"}, mlp_width=1024)
    count, types = sizes["n_layers"], raw.get("layer_types")
    if not isinstance(types, list) or len(types) != count:
        raise ConfigError(f"layer_types must be a list of {count} names, one for each layer")
    if unknown := [name for name in types if name not in ("attention", "full_attention")]:
        raise ConfigError(f"layer_types has {unknown[0]!r:.40}, which is not supported, only attention")
    rope = read_whole_rope(raw) if raw.get("position_embedding_type") == "rope" else None
    return _read(raw, sizes, LayerKind(rope=rope))


_family = partial(FamilySpec, prefix="model.", ignored=re.compile(r".*rotary_emb\.inv_freq"))
GRANITE = _family(
    name="granite", models="Granite 3, 2B and 8B", architecture="GraniteForCausalLM", read=_read_granite, names=NAMES
)
GRANITE_HYBRID = _family(
    name="granitemoehybrid",
    models="Granite 4 without experts and states: 350M, 1B, micro",
    architecture="GraniteMoeHybridForCausalLM",
    read=_read_hybrid,
    names=_HYBRID,
)
