"""gpt_neox: parallel residual, partly rotary heads, and q, k, v interleaved head by head."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from model.config import ModelConfig
from model.families.spec import (
    ACTIVATION_NAMES,
    FamilySpec,
    Raw,
    TensorMapping,
    activation,
    head_size,
    linear,
    norm,
    read_fields,
    read_rope,
    rope_parameters,
    single,
    write_fields,
    write_rope,
)


def _mappings(config: ModelConfig) -> list[TensorMapping]:
    width, mlp = config.width, config.mlp_width
    mappings = [single("embedding", "gpt_neox.embed_in.weight", config.vocab_size, width)]
    for layer in range(config.n_layers):
        target, source = f"blocks.{layer}", f"gpt_neox.layers.{layer}"
        out, up, down = f"{source}.attention.dense", f"{source}.mlp.dense_h_to_4h", f"{source}.mlp.dense_4h_to_h"
        mappings += norm(f"{target}.norm_attention", f"{source}.input_layernorm", config)
        mappings += _interleaved(f"{target}.attention.qkv", f"{source}.attention.query_key_value", config)
        mappings += linear(f"{target}.attention.out", [(out, width)], width, bias=config.out_bias)
        mappings += norm(f"{target}.norm_mlp", f"{source}.post_attention_layernorm", config)
        mappings += linear(f"{target}.mlp.up", [(up, mlp)], width, bias=config.mlp_bias)
        mappings += linear(f"{target}.mlp.down", [(down, width)], mlp, bias=config.mlp_bias)
    mappings += norm("norm", "gpt_neox.final_layer_norm", config)
    if not config.tied_head:
        mappings.append(single("untied_head", "embed_out.weight", config.vocab_size, width))
    return mappings


def _interleaved(target: str, source: str, config: ModelConfig) -> list[TensorMapping]:
    """The file orders rows by head: q, k, v of head 0, then of head 1, ..."""
    load: Callable[[Any], Any] = partial(_swap, outer=config.n_heads, inner=3)
    save: Callable[[Any], Any] = partial(_swap, outer=3, inner=config.n_heads)
    rows = 3 * config.n_heads * config.head_dim
    weight = TensorMapping(f"{target}.weight", ((f"{source}.weight", (rows, config.width)),), load=load, save=save)
    bias = TensorMapping(f"{target}.bias", ((f"{source}.bias", (rows,)),), load=load, save=save)
    return [weight, bias] if config.qkv_bias else [weight]


def _swap(tensor: Any, *, outer: int, inner: int) -> Any:
    """Reorders rows from [outer, inner, head_dim] to [inner, outer, head_dim]."""
    head_dim = len(tensor) // (outer * inner)
    rows = tensor.reshape(outer, inner, head_dim, *tensor.shape[1:])
    return rows.swapaxes(0, 1).reshape(tensor.shape)


_KEYS = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "mlp_width": "intermediate_size",
    "context": "max_position_embeddings",
    "norm_eps": "layer_norm_eps",
    "qkv_bias": "attention_bias",
    "parallel_residual": "use_parallel_residual",
    "tied_head": "tie_word_embeddings",
}


def _read(raw: Raw) -> ModelConfig:
    sizes = read_fields(raw, _KEYS, norm_eps=1e-5, qkv_bias=True, parallel_residual=True, tied_head=False)
    head_dim = head_size(raw, "hidden_size", "num_attention_heads")
    share = rope_parameters(raw).get("partial_rotary_factor", raw.get("rotary_pct", 0.25))
    rotary_dim = int(head_dim * share)
    return ModelConfig(
        **sizes,
        n_kv_heads=sizes["n_heads"],
        head_dim=head_dim,
        norm="layernorm",
        norm_bias=True,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        activation=activation(raw.get("hidden_act", "gelu")),
        gated=False,
        out_bias=sizes["qkv_bias"],
        mlp_bias=True,
        **read_rope(raw),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    rope, share = write_rope(config), config.effective_rotary_dim / config.head_dim
    return {
        **write_fields(config, _KEYS),
        "hidden_act": ACTIVATION_NAMES[config.activation],
        "rotary_pct": share,
        "rotary_emb_base": config.rope_theta,
        **rope,
        "rope_parameters": {**rope["rope_parameters"], "partial_rotary_factor": share},
    }


GPT_NEOX = FamilySpec(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    read=_read,
    write=_write,
    mappings=_mappings,
    prefix="gpt_neox.",
    ignored=re.compile(r".*attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
)
