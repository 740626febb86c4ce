"""gpt_neo: learned positions, a window in every second layer, and attention scores that are not scaled."""

from __future__ import annotations

import re
from typing import Any

from model.config import ConfigError, LayerKind, ModelConfig, Size, check_value
from model.families.spec import (
    FamilySpec,
    Layers,
    Raw,
    activation,
    check_layers,
    head_size,
    read_fields,
    read_layers,
)

_LAYER, _ATTENTION = "transformer.h.N", "transformer.h.N.attn.attention"
_NAMES: dict[str, str | tuple[str, ...]] = {
    "embedding": "transformer.wte.weight",
    "position_embedding": "transformer.wpe.weight",
    "untied_head": "lm_head.weight",
    "norm": "transformer.ln_f",
    "blocks.N.norm_attention": f"{_LAYER}.ln_1",
    "blocks.N.attention.qkv": tuple(f"{_ATTENTION}.{part}_proj" for part in "qkv"),
    "blocks.N.attention.out": f"{_ATTENTION}.out_proj",
    "blocks.N.norm_mlp": f"{_LAYER}.ln_2",
    "blocks.N.mlp.up": f"{_LAYER}.mlp.c_fc",
    "blocks.N.mlp.down": f"{_LAYER}.mlp.c_proj",
}
_KEYS = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "n_layers": "num_layers",
    "n_heads": "num_heads",
    "mlp_width": "intermediate_size",
    "context": "max_position_embeddings",
    "norm_eps": "layer_norm_epsilon",
    "tied_head": "tie_word_embeddings",
}


def _read(raw: Raw) -> ModelConfig:
    sizes = read_fields(raw, _KEYS, mlp_width=None, norm_eps=1e-5, tied_head=True)
    sizes["mlp_width"] = sizes["mlp_width"] or 4 * sizes["width"]
    return ModelConfig(
        **sizes,
        **_layers(raw, sizes["n_layers"]),
        n_kv_heads=sizes["n_heads"],
        head_dim=head_size(raw, "hidden_size", "num_heads"),
        norm="layernorm",
        norm_bias=True,
        positions="learned",
        activation=activation(raw.get("activation_function", "gelu_new")),
        gated=False,
        attention_scale=1.0,
        out_bias=True,
        mlp_bias=True,
    )


def _layers(raw: Raw, n_layers: int) -> Layers:
    """attention_layers names each layer; attention_types has pairs of such names and how often they recur."""
    window, key = raw.get("window_size", 256), "attention_layers"
    check_value(window, Size, "window_size")
    names = raw.get(key)
    if names is None:
        key = "attention_types"
        names = _repeated([[["global", "local"], 12]] if raw.get(key) is None else raw[key], check_layers(n_layers))
    if not isinstance(names, list) or len(names) != n_layers or any(name not in ("global", "local") for name in names):
        raise ConfigError(f"{key} must name each of the {n_layers} layers, as global or local")
    kinds = {"global": LayerKind(), "local": LayerKind(window=window)}
    return read_layers(n_layers, lambda layer: kinds[names[layer]])


def _repeated(pairs: Any, n_layers: int) -> list[Any]:
    """At most one name more than there are layers, since a file may ask for billions; empty for invalid pairs."""
    names: list[Any] = []
    try:
        for group, count in pairs:
            names += list(group) * min(count, n_layers + 1)
            del names[n_layers + 1 :]
    except (TypeError, ValueError):
        return []
    return names


GPT_NEO = FamilySpec(
    name="gpt_neo",
    models="GPT-Neo 125M to 2.7B",
    architecture="GPTNeoForCausalLM",
    read=_read,
    names=_NAMES,
    prefix="transformer.",
    ignored=re.compile(r".*attn\.attention\.(bias|masked_bias)"),
)
