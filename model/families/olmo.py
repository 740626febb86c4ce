"""olmo: layernorms without weights. olmo2, olmo3: norms of outputs, of all queries and all keys; olmo3: windows."""

from __future__ import annotations

from typing import Any

from model.config import LayerKind, ModelConfig, Size, check_value
from model.families.llama import NAMES, llama_family, read_attention_biases, read_dialect
from model.families.rope import check_ropes_by_type, read_whole_rope
from model.families.spec import Layers, Raw, read_layers, read_windows, require_values

_THETA = 500_000.0
"""Base of the rotations of olmo3."""
_OUTPUT_NORMS = {
    **NAMES,
    "blocks.N.norm_attention_output": "model.layers.N.post_attention_layernorm",
    "blocks.N.norm_mlp_output": "model.layers.N.post_feedforward_layernorm",
}


def _read_olmo(raw: Raw) -> ModelConfig:
    require_values(raw, clip_qkv=None)
    dialect: dict[str, Any] = {"norm": "layernorm", "norm_weight": False, "norm_eps": 1e-5}
    return read_dialect(raw, **dialect, **read_attention_biases(raw))


def _read_olmo2(raw: Raw, layers: Layers | None = None) -> ModelConfig:
    require_values(raw, clip_qkv=None)
    dialect: dict[str, Any] = {"norm_position": "output", "qk_norm": "width", **read_attention_biases(raw)}
    return read_dialect(raw, defaults={"norm_eps": 1e-5}, layers=layers, **dialect)


def _read_olmo3(raw: Raw) -> ModelConfig:
    """rope_scaling of transformers 4 is meant for the layers without a window."""
    require_values(raw, rope_theta=(_THETA, None))  # transformers 5 forgets another one in layers with a window
    check_ropes_by_type(raw)
    rope = read_whole_rope(raw, layer_type="full_attention", theta=_THETA)
    local_rope = read_whole_rope({**raw, "rope_scaling": None}, layer_type="sliding_attention", theta=_THETA)
    window = raw.get("sliding_window", 4096)
    check_value(window, Size, "sliding_window")
    windows = read_windows(raw, "num_hidden_layers", window, lambda layer: (layer + 1) % 4 > 0)
    local, everywhere = LayerKind(window=window, rope=local_rope), LayerKind(rope=rope)
    return _read_olmo2(raw, read_layers(len(windows), lambda layer: local if windows[layer] else everywhere))


OLMO = llama_family(name="olmo", models="OLMo 1B and 7B", architecture="OlmoForCausalLM", read=_read_olmo)
OLMO2 = llama_family(
    name="olmo2", models="OLMo 2, 1B to 13B", architecture="Olmo2ForCausalLM", read=_read_olmo2, names=_OUTPUT_NORMS
)
OLMO3 = llama_family(
    name="olmo3", models="Olmo 3 7B", architecture="Olmo3ForCausalLM", read=_read_olmo3, names=_OUTPUT_NORMS
)
