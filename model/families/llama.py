"""llama, mistral, qwen2, qwen3: one layout of tensors, four dialects of config.json."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from model.config import ConfigError, ModelConfig
from model.families.spec import (
    ACTIVATION_NAMES,
    FamilySpec,
    Raw,
    TensorMapping,
    activation,
    linear,
    norm,
    read_fields,
    read_rope,
    require_values,
    rope_parameters,
    single,
    write_fields,
    write_rope,
)

_BUFFERS = re.compile(r".*rotary_emb\.inv_freq")


def _mappings(config: ModelConfig) -> list[TensorMapping]:
    width, head_dim = config.width, config.head_dim
    q_rows, kv_rows = config.n_heads * head_dim, config.n_kv_heads * head_dim
    mappings = [single("embedding", "model.embed_tokens.weight", config.vocab_size, width)]
    for layer in range(config.n_layers):
        target, source = f"blocks.{layer}", f"model.layers.{layer}"
        attention, mlp = f"{source}.self_attn", f"{source}.mlp"
        qkv = [(f"{attention}.q_proj", q_rows), (f"{attention}.k_proj", kv_rows), (f"{attention}.v_proj", kv_rows)]
        gate_up = [(f"{mlp}.gate_proj", config.mlp_width), (f"{mlp}.up_proj", config.mlp_width)]
        mappings += norm(f"{target}.norm_attention", f"{source}.input_layernorm", config)
        mappings += linear(f"{target}.attention.qkv", qkv, width, bias=config.qkv_bias)
        mappings += linear(f"{target}.attention.out", [(f"{attention}.o_proj", width)], q_rows, bias=config.out_bias)
        if config.qk_norm:
            mappings += [
                single(f"{target}.attention.{x}_norm.weight", f"{attention}.{x}_norm.weight", head_dim) for x in "qk"
            ]
        mappings += norm(f"{target}.norm_mlp", f"{source}.post_attention_layernorm", config)
        mappings += linear(f"{target}.mlp.up", gate_up, width, bias=config.mlp_bias)
        mappings += linear(f"{target}.mlp.down", [(f"{mlp}.down_proj", width)], config.mlp_width, bias=config.mlp_bias)
    mappings += norm("norm", "model.norm", config)
    return (
        mappings if config.tied_head else [*mappings, single("untied_head", "lm_head.weight", config.vocab_size, width)]
    )


_KEYS = {
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


def _read(raw: Raw, *, default_kv_heads: int | None = None, **dialect: Any) -> ModelConfig:
    for section in (raw, rope_parameters(raw)):
        require_values(section, partial_rotary_factor=1.0)
    sizes = read_fields(raw, _KEYS, n_kv_heads=default_kv_heads, head_dim=None, norm_eps=1e-6, tied_head=False)
    sizes["n_kv_heads"] = sizes["n_kv_heads"] or sizes["n_heads"]
    sizes["head_dim"] = sizes["head_dim"] or sizes["width"] // sizes["n_heads"]
    return ModelConfig(
        **{**sizes, "activation": activation(raw.get("hidden_act", "silu")), **read_rope(raw), **dialect}
    )


def _read_llama(raw: Raw) -> ModelConfig:
    bias = raw.get("attention_bias", False)
    return _read(raw, qkv_bias=bias, out_bias=bias, mlp_bias=raw.get("mlp_bias", False))


def _read_mistral(raw: Raw) -> ModelConfig:
    return _read(raw, default_kv_heads=8, sliding_window=raw.get("sliding_window", 4096))


def _read_qwen2(raw: Raw) -> ModelConfig:
    return _read(raw, default_kv_heads=32, qkv_bias=True, sliding_window=_qwen_window(raw))


def _read_qwen3(raw: Raw) -> ModelConfig:
    bias = raw.get("attention_bias", False)
    dialect = {"qkv_bias": bias, "out_bias": bias, "head_dim": raw.get("head_dim") or 128}
    return _read(raw, default_kv_heads=32, qk_norm=True, sliding_window=_qwen_window(raw), **dialect)


def _qwen_window(raw: Raw) -> int | None:
    """Qwen uses the window in layers from max_window_layers on; ModelConfig supports all layers or none."""
    window: int | None = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    kinds = set(raw.get("layer_types") or ())
    if not kinds:
        first = raw.get("max_window_layers", 28)
        kinds |= {"full_attention"} if first > 0 else set()
        kinds |= {"sliding_attention"} if first < raw["num_hidden_layers"] else set()
    if window is None or kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise ConfigError("a sliding window on some layers only is not supported; all layers or none")
    return window


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_fields(config, _KEYS),
        "hidden_act": ACTIVATION_NAMES[config.activation],
        **write_rope(config),
    }


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    return {**_write(config), "attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


def _write_mistral(config: ModelConfig) -> dict[str, Any]:
    return {**_write(config), "sliding_window": config.sliding_window}


def _write_qwen(config: ModelConfig) -> dict[str, Any]:
    window = config.sliding_window
    kind = "full_attention" if window is None else "sliding_attention"
    sliding = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 0}
    return {**_write(config), **sliding, "layer_types": [kind] * config.n_layers}


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return {**_write_qwen(config), "attention_bias": config.out_bias}


_family = partial(FamilySpec, mappings=_mappings, prefix="model.", ignored=_BUFFERS)
LLAMA = _family(name="llama", architecture="LlamaForCausalLM", read=_read_llama, write=_write_llama)
MISTRAL = _family(name="mistral", architecture="MistralForCausalLM", read=_read_mistral, write=_write_mistral)
QWEN2 = _family(name="qwen2", architecture="Qwen2ForCausalLM", read=_read_qwen2, write=_write_qwen)
QWEN3 = _family(name="qwen3", architecture="Qwen3ForCausalLM", read=_read_qwen3, write=_write_qwen3)
