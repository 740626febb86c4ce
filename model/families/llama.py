"""llama, mistral, qwen2, qwen3: one layout of tensors, four dialects of config.json, which other families vary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from model.config import LayerKind, ModelConfig, Rope, check_field
from model.families.rope import read_whole_rope, write_rope
from model.families.spec import (
    ACTIVATION_NAMES,
    FamilySpec,
    Layers,
    Raw,
    activation,
    read_fields,
    read_layers,
    read_windows,
    write_fields,
)

_ATTENTION, _MLP = "model.layers.N.self_attn", "model.layers.N.mlp"
NAMES: dict[str, str | tuple[str, ...]] = {
    "embedding": "model.embed_tokens.weight",
    "untied_head": "lm_head.weight",
    "norm": "model.norm",
    "blocks.N.norm_attention": "model.layers.N.input_layernorm",
    "blocks.N.attention.qkv": (f"{_ATTENTION}.q_proj", f"{_ATTENTION}.k_proj", f"{_ATTENTION}.v_proj"),
    "blocks.N.attention.q_norm": f"{_ATTENTION}.q_norm",
    "blocks.N.attention.k_norm": f"{_ATTENTION}.k_norm",
    "blocks.N.attention.out": f"{_ATTENTION}.o_proj",
    "blocks.N.norm_mlp": "model.layers.N.post_attention_layernorm",
    "blocks.N.mlp.up": (f"{_MLP}.gate_proj", f"{_MLP}.up_proj"),
    "blocks.N.mlp.down": f"{_MLP}.down_proj",
}
KEYS = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
    "context": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied_head": "tie_word_embeddings",
}


def read_sizes(raw: Raw, keys: Mapping[str, str] = KEYS, **defaults: Any) -> dict[str, Any]:
    """Fields of ModelConfig; the numbers of heads and their size may be missing or null. Raises as read_fields()."""
    defaults = {"n_kv_heads": None, "head_dim": None, "norm_eps": 1e-6, "tied_head": False, **defaults}
    sizes = read_fields(raw, keys, **defaults)
    sizes["n_kv_heads"] = sizes["n_kv_heads"] or sizes["n_heads"]
    sizes["head_dim"] = sizes["head_dim"] or sizes["width"] // sizes["n_heads"]
    return sizes


def read_dialect(
    raw: Raw, *, defaults: Mapping[str, Any] | None = None, layers: Layers | None = None, **dialect: Any
) -> ModelConfig:
    """ModelConfig of a family with llama's keys; `dialect` has the fields that these do not decide.

    defaults: of read_sizes(). layers: of read_layers(), unless all layers have one rotation and no window.
    """
    sizes = read_sizes(raw, **defaults or {})
    layers = layers or {"layer_kinds": (LayerKind(rope=read_whole_rope(raw)),)}
    return ModelConfig(**{**sizes, "activation": activation(raw.get("hidden_act", "silu")), **layers, **dialect})


def read_attention_biases(raw: Raw, *, default: bool = False) -> dict[str, Any]:
    """qkv_bias and out_bias, for which most families have one key."""
    bias = read_fields(raw, {"qkv_bias": "attention_bias"}, qkv_bias=default)["qkv_bias"]
    return {"qkv_bias": bias, "out_bias": bias}


def read_one_window(raw: Raw, rope: Rope, default: int | None = None) -> Layers:
    """Layers of one kind, with the window of the key sliding_window. Raises ConfigError."""
    window = raw.get("sliding_window", default)
    check_field("window", window, "sliding_window", LayerKind)
    return {"layer_kinds": (LayerKind(window=window, rope=rope),)}


def _read_llama(raw: Raw) -> ModelConfig:
    return read_dialect(raw, **read_attention_biases(raw), mlp_bias=raw.get("mlp_bias", False))


def _read_mistral(raw: Raw) -> ModelConfig:
    return read_dialect(raw, defaults={"n_kv_heads": 8}, layers=read_one_window(raw, read_whole_rope(raw), 4096))


def _read_qwen2(raw: Raw) -> ModelConfig:
    return read_dialect(raw, defaults={"n_kv_heads": 32}, qkv_bias=True, layers=_qwen_layers(raw))


def _read_qwen3(raw: Raw) -> ModelConfig:
    dialect = {**read_attention_biases(raw), "qk_norm": "head", "head_dim": raw.get("head_dim") or 128}
    return read_dialect(raw, defaults={"n_kv_heads": 32}, layers=_qwen_layers(raw), **dialect)


def _qwen_layers(raw: Raw) -> Layers | None:
    """By default the layers from max_window_layers on have a window."""
    if not raw.get("use_sliding_window", False):
        return None
    first, window, rope = raw.get("max_window_layers", 28), raw.get("sliding_window", 4096), read_whole_rope(raw)
    windows = read_windows(raw, "num_hidden_layers", window, lambda layer: layer >= first)
    return read_layers(len(windows), lambda layer: LayerKind(window=windows[layer], rope=rope))


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_fields(config, KEYS),
        "hidden_act": ACTIVATION_NAMES[config.activation],
        **write_rope(config.layer_kinds[0].rope or Rope()),
    }


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    return {**_write(config), "attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    window = next(filter(None, config.windows), None)
    types = ["full_attention" if each is None else "sliding_attention" for each in config.windows]
    sliding = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 0}
    return {**_write(config), **sliding, "layer_types": types, "attention_bias": config.out_bias}


llama_family = partial(FamilySpec, names=NAMES, prefix="model.", ignored=re.compile(r".*rotary_emb\.inv_freq"))
"""A FamilySpec with these names, unless it brings its own."""
LLAMA = llama_family(
    name="llama",
    models="Llama 1 to 3.2, SmolLM, SmolLM2, TinyLlama, Yi, DeepSeek-R1-Distill-Llama, Falcon 3",
    architecture="LlamaForCausalLM",
    read=_read_llama,
    write=_write_llama,
)
MISTRAL = llama_family(
    name="mistral", models="Mistral 7B, Mistral Nemo 12B", architecture="MistralForCausalLM", read=_read_mistral
)
QWEN2 = llama_family(
    name="qwen2",
    models="Qwen2 and Qwen2.5, 0.5B to 14B, DeepSeek-R1-Distill-Qwen",
    architecture="Qwen2ForCausalLM",
    read=_read_qwen2,
)
QWEN3 = llama_family(
    name="qwen3",
    models="Qwen3, 0.6B to 14B, without experts",
    architecture="Qwen3ForCausalLM",
    read=_read_qwen3,
    write=_write_qwen3,
)
