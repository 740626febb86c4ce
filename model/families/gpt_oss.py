"""gpt_oss: windows in every other layer, sinks, biases, and experts with a clamped SwiGLU."""

from __future__ import annotations

from typing import Any

from model.config import LayerKind, ModelConfig
from model.families.experts import read_experts, with_experts
from model.families.layouts import PACKED_BLOCKS, experts_interleaved
from model.families.llama import NAMES, llama_family, read_attention_biases, read_dialect
from model.families.rope import read_whole_rope
from model.families.spec import Raw, read_layers, read_windows, require_values

_MLP = "model.layers.N.mlp"
_NAMES = {name: value for name, value in NAMES.items() if ".mlp." not in name} | {
    "blocks.N.attention.sinks": "model.layers.N.self_attn.sinks",
    "blocks.N.mlp.router": f"{_MLP}.router",
    "blocks.N.mlp.experts.up": f"{_MLP}.experts.gate_up_proj",
    "blocks.N.mlp.experts.up_bias": f"{_MLP}.experts.gate_up_proj_bias",
    "blocks.N.mlp.experts.down": f"{_MLP}.experts.down_proj",
    "blocks.N.mlp.experts.down_bias": f"{_MLP}.experts.down_proj_bias",
}
_PACKED = {
    name: f"{value}{PACKED_BLOCKS}"
    for name, value in _NAMES.items()
    if name in ("blocks.N.mlp.experts.up", "blocks.N.mlp.experts.down")
}
_KEYS = {"count": ("num_experts", "num_local_experts"), "width": ("intermediate_size",)}
_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def _read(raw: Raw) -> ModelConfig:
    require_values(raw, swiglu_limit=7.0, swiglu_alpha=1.702, hidden_act="silu")
    rope = read_whole_rope(raw, theta=150_000.0, default=_ROPE)
    window = raw.get("sliding_window", 128)
    windows = read_windows(raw, "num_hidden_layers", window, lambda layer: layer % 2 == 0)
    layers = read_layers(len(windows), lambda layer: LayerKind(window=windows[layer], rope=rope, mlp="experts"))
    dialect: dict[str, Any] = {"score": "softmax_of_chosen", "router_bias": True, "bias": True}
    experts = read_experts(raw, _KEYS, {"count": 128, "chosen": 4}, **dialect)
    return read_dialect(
        raw,
        defaults={"n_kv_heads": 8, "head_dim": 64, "norm_eps": 1e-5},
        layers=with_experts(layers, experts),
        activation="swiglu_clamped",
        sinks=True,
        **read_attention_biases(raw, default=True),
    )


GPT_OSS = llama_family(
    name="gpt_oss",
    models="gpt-oss 20b",
    architecture="GptOssForCausalLM",
    read=_read,
    names=_NAMES,
    fused=_PACKED,
    layout=experts_interleaved,
)
