"""gpt2: learned positions, LayerNorm, and matrices stored as [columns, rows]."""

from __future__ import annotations

import re
from typing import Any

from model.config import ModelConfig
from model.families.spec import (
    ACTIVATION_NAMES,
    FamilySpec,
    Raw,
    TensorMapping,
    activation,
    head_size,
    norm,
    read_fields,
    require_values,
    single,
    write_fields,
)


def _mappings(config: ModelConfig) -> list[TensorMapping]:
    width, mlp = config.width, config.mlp_width
    mappings = [
        single("embedding", "transformer.wte.weight", config.vocab_size, width),
        single("position_embedding", "transformer.wpe.weight", config.context, width),
    ]
    for layer in range(config.n_layers):
        target, source = f"blocks.{layer}", f"transformer.h.{layer}"
        mappings += norm(f"{target}.norm_attention", f"{source}.ln_1", config)
        mappings += _transposed(f"{target}.attention.qkv", f"{source}.attn.c_attn", 3 * width, width)
        mappings += _transposed(f"{target}.attention.out", f"{source}.attn.c_proj", width, width)
        mappings += norm(f"{target}.norm_mlp", f"{source}.ln_2", config)
        mappings += _transposed(f"{target}.mlp.up", f"{source}.mlp.c_fc", mlp, width)
        mappings += _transposed(f"{target}.mlp.down", f"{source}.mlp.c_proj", width, mlp)
    mappings += norm("norm", "transformer.ln_f", config)
    return (
        mappings if config.tied_head else [*mappings, single("untied_head", "lm_head.weight", config.vocab_size, width)]
    )


def _transposed(target: str, source: str, rows: int, columns: int) -> list[TensorMapping]:
    weight = TensorMapping(
        f"{target}.weight", ((f"{source}.weight", (columns, rows)),), load=_transpose, save=_transpose
    )
    return [weight, single(f"{target}.bias", f"{source}.bias", rows)]


def _transpose(matrix: Any) -> Any:
    return matrix.T


_KEYS = {
    "vocab_size": "vocab_size",
    "width": "n_embd",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "mlp_width": "n_inner",
    "context": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "tied_head": "tie_word_embeddings",
}


def _read(raw: Raw) -> ModelConfig:
    require_values(raw, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    sizes = read_fields(raw, _KEYS, mlp_width=None, norm_eps=1e-5, tied_head=True)
    sizes["mlp_width"] = sizes["mlp_width"] or 4 * sizes["width"]
    return ModelConfig(
        **sizes,
        n_kv_heads=sizes["n_heads"],
        head_dim=head_size(raw, "n_embd", "n_head"),
        norm="layernorm",
        norm_bias=True,
        positions="learned",
        activation=activation(raw.get("activation_function", "gelu_new")),
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_fields(config, _KEYS), "activation_function": ACTIVATION_NAMES[config.activation]}


GPT2 = FamilySpec(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    read=_read,
    write=_write,
    mappings=_mappings,
    prefix="transformer.",
    ignored=re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"),
)
