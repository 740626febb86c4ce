"""granite and granitemoehybrid: llama with factors of embeddings, scores, sums and logits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from model.config import ConfigError, Count, LayerKind, ModelConfig, Positive, Rope, check_field, check_value
from model.families.experts import read_experts, with_experts
from model.families.llama import KEYS, NAMES, read_attention_biases, read_sizes
from model.families.rope import read_whole_rope
from model.families.spec import FamilySpec, Layers, Raw, activation, read_fields, require_values

_MOE = "model.layers.N.block_sparse_moe"
MOE_NAMES = {
    **{name: value for name, value in NAMES.items() if ".mlp." not in name},
    "blocks.N.mlp.router": f"{_MOE}.router.layer",
    "blocks.N.mlp.experts.up": f"{_MOE}.input_linear.weight",
    "blocks.N.mlp.experts.down": f"{_MOE}.output_linear.weight",
    "blocks.N.mlp.shared.up": "model.layers.N.shared_mlp.input_linear",
    "blocks.N.mlp.shared.down": "model.layers.N.shared_mlp.output_linear",
}
MOE_FUSED = {
    "blocks.N.mlp.router": f"{_MOE}.router",
    "blocks.N.mlp.experts.up": f"{_MOE}.experts.gate_up_proj",
    "blocks.N.mlp.experts.down": f"{_MOE}.experts.down_proj",
}
_HYBRID = {
    **MOE_NAMES,
    "blocks.N.mlp.up": "model.layers.N.shared_mlp.input_linear",
    "blocks.N.mlp.down": "model.layers.N.shared_mlp.output_linear",
}
_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}


def read_granite(raw: Raw, sizes: Mapping[str, Any], layers: Layers, **dialect: Any) -> ModelConfig:
    """ModelConfig of a granite with these sizes and layers. Raises ConfigError."""
    return ModelConfig(
        **{**sizes, **layers},
        **_read_scales(raw),
        activation=activation(raw.get("hidden_act", "silu")),
        **read_attention_biases(raw),
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
    return read_granite(raw, read_sizes(raw), {"layer_kinds": (LayerKind(rope=read_whole_rope(raw)),)}, **bias)


def _read_hybrid(raw: Raw) -> ModelConfig:
    """Reads models whose layers are all attention, with a feed-forward network, or with experts and a shared one."""
    require_values(raw, position_embedding_type=("rope", "nope", None))
    check_field("mlp_width", raw.get("shared_intermediate_size", 1024), "shared_intermediate_size")
    n_experts = raw.get("num_local_experts", 8)
    check_value(n_experts, Count, "num_local_experts")
    sizes = read_sizes(raw, {**KEYS, "mlp_width": "shared_intermediate_size"}, mlp_width=1024)
    count, types = sizes["n_layers"], raw.get("layer_types")
    if not isinstance(types, list) or len(types) != count:
        raise ConfigError(f"layer_types must be a list of {count} names, one for each layer")
    if unknown := [name for name in types if name not in ("attention", "full_attention")]:
        raise ConfigError(f"layer_types has {unknown[0]!r:.40}, which is not supported, only attention")
    rope = read_whole_rope(raw) if raw.get("position_embedding_type") == "rope" else None
    if not n_experts:
        return read_granite(raw, sizes, {"layer_kinds": (LayerKind(rope=rope),)})
    return read_granite(raw, sizes, granite_experts(raw, rope, shared_width=sizes["mlp_width"]))


def granite_experts(raw: Raw, rope: Rope | None, *, shared_width: int) -> Layers:
    """Layers that all have experts."""
    keys = {"count": ("num_local_experts",), "width": ("intermediate_size",)}
    dialect: dict[str, Any] = {"score": "softmax_of_chosen", "shared_width": shared_width}
    experts = read_experts(raw, keys, {"count": 8, "chosen": 2}, **dialect)
    return with_experts({"layer_kinds": (LayerKind(rope=rope, mlp="experts"),)}, experts)


_family = partial(FamilySpec, prefix="model.", ignored=re.compile(r".*rotary_emb\.inv_freq"))
GRANITE = _family(
    name="granite", models="Granite 3, 2B and 8B", architecture="GraniteForCausalLM", read=_read_granite, names=NAMES
)
GRANITE_HYBRID = _family(
    name="granitemoehybrid",
    models="Granite 4 without states: 350M, 1B, micro",
    architecture="GraniteMoeHybridForCausalLM",
    read=_read_hybrid,
    names=_HYBRID,
    fused=MOE_FUSED,
)
