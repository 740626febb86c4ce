"""Experts of a config.json, and the names that most families give their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.config import Experts
from model.families.spec import Layers, Raw, read_fields

_MLP = "model.layers.N.mlp"
EXPERT_NAMES: dict[str, str | tuple[str, ...]] = {
    "blocks.N.mlp.router": f"{_MLP}.gate",
    "blocks.N.mlp.experts.up": (f"{_MLP}.experts.E.gate_proj.weight", f"{_MLP}.experts.E.up_proj.weight"),
    "blocks.N.mlp.experts.down": f"{_MLP}.experts.E.down_proj.weight",
}
FUSED_NAMES = {
    "blocks.N.mlp.experts.up": f"{_MLP}.experts.gate_up_proj",
    "blocks.N.mlp.experts.down": f"{_MLP}.experts.down_proj",
}
"""See FamilySpec.fused."""
_KEYS = {
    "count": ("num_local_experts", "num_experts"),
    "chosen": ("num_experts_per_tok",),
    "width": ("moe_intermediate_size",),
}


def read_experts(
    raw: Raw, keys: Mapping[str, tuple[str, ...]], defaults: Mapping[str, Any] | None = None, **dialect: Any
) -> Experts:
    """The experts of a config.json. Raises ConfigError, KeyError.

    keys: field of Experts -> its keys, of which the first that is present counts; without an entry those that most
    families have. defaults: by field. dialect: the fields that have no key.
    """
    named = {
        field: next((name for name in names if name in raw), names[0]) for field, names in {**_KEYS, **keys}.items()
    }
    return Experts(**read_fields(raw, named, of=Experts, **defaults or {}), **dialect)


def with_experts(layers: Layers, experts: Experts) -> Layers:
    """Fields of ModelConfig of these layers: `experts` if one has them, and no mlp_width unless one is dense."""
    mlps = {kind.mlp for kind in layers["layer_kinds"]}
    fields = {**layers, "experts": experts if "experts" in mlps else None}
    return fields if "dense" in mlps else {**fields, "mlp_width": 0}
