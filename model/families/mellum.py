"""mellum: qwen3_moe with windows, a rotation for each type of attention, and dense layers by name."""

from __future__ import annotations

import re
from typing import Literal

from model.config import ConfigError, LayerKind, ModelConfig, Size, check_value
from model.families.experts import EXPERT_NAMES, FUSED_NAMES, read_experts, with_experts
from model.families.llama import NAMES, llama_family, read_attention_biases, read_dialect
from model.families.rope import check_ropes_by_type, read_whole_rope
from model.families.spec import Raw, read_layers, read_windows, require_values

_KEYS = {"count": ("num_local_experts", "num_experts"), "normalized": ("norm_topk_prob",)}
_MLPS: dict[str, Literal["dense", "experts"]] = {"sparse": "experts", "dense": "dense"}


def _read(raw: Raw) -> ModelConfig:
    require_values(raw, rope_scaling=None, rope_theta=None)  # which transformers does not read
    check_ropes_by_type(raw)
    window = raw.get("sliding_window", 1024)
    windows = read_windows(raw, "num_hidden_layers", window, lambda _: False)
    if "sliding_attention" in (raw.get("layer_types") or ()):
        check_value(window, Size, "sliding_window")
    mlps = raw.get("mlp_layer_types") or ["sparse"] * len(windows)
    if not isinstance(mlps, list) or len(mlps) != len(windows) or not {*mlps} <= _MLPS.keys():
        raise ConfigError(f"mlp_layer_types must be a list of {len(windows)} names, each of them sparse or dense")
    rope = read_whole_rope(raw, layer_type="full_attention", theta=500_000.0)
    local_rope = read_whole_rope(raw, layer_type="sliding_attention")

    def kind(layer: int) -> LayerKind:
        has_window = windows[layer] is not None
        return LayerKind(window=windows[layer], rope=local_rope if has_window else rope, mlp=_MLPS[mlps[layer]])

    experts = read_experts(raw, _KEYS, {"count": 64, "chosen": 8, "width": 896, "normalized": True})
    return read_dialect(
        raw,
        defaults={"n_kv_heads": 4, "head_dim": 128},
        layers=with_experts(read_layers(len(windows), kind), experts),
        qk_norm="head",
        **read_attention_biases(raw),
    )


MELLUM = llama_family(
    name="mellum",
    models="Mellum 2 12B-A2.5B",
    architecture="MellumForCausalLM",
    read=_read,
    names={**NAMES, **EXPERT_NAMES},
    fused=FUSED_NAMES,
    ignored=re.compile(r"mtp\..+|.*rotary_emb\.inv_freq"),
)
