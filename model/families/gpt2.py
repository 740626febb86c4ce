"""gpt2, gpt_bigcode: learned positions, LayerNorm; gpt2 stores matrices as [columns, rows]."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from model.config import LayerKind, ModelConfig, check_value
from model.families.layouts import heads_interleaved, transposed
from model.families.spec import (
    ACTIVATION_NAMES,
    FamilySpec,
    Raw,
    activation,
    head_size,
    read_fields,
    require_values,
    write_fields,
)

_NAMES = {
    "embedding": "transformer.wte.weight",
    "position_embedding": "transformer.wpe.weight",
    "untied_head": "lm_head.weight",
    "norm": "transformer.ln_f",
    "blocks.N.norm_attention": "transformer.h.N.ln_1",
    "blocks.N.attention.qkv": "transformer.h.N.attn.c_attn",
    "blocks.N.attention.out": "transformer.h.N.attn.c_proj",
    "blocks.N.norm_mlp": "transformer.h.N.ln_2",
    "blocks.N.mlp.up": "transformer.h.N.mlp.c_fc",
    "blocks.N.mlp.down": "transformer.h.N.mlp.c_proj",
}


KEYS = {
    "vocab_size": "vocab_size",
    "width": "n_embd",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "mlp_width": "n_inner",
    "context": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "tied_head": "tie_word_embeddings",
}


def _read(raw: Raw, default_activation: str = "gelu_new") -> ModelConfig:
    require_values(raw, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    sizes = read_fields(raw, KEYS, mlp_width=None, norm_eps=1e-5, tied_head=True)
    sizes["mlp_width"] = sizes["mlp_width"] or 4 * sizes["width"]
    return ModelConfig(
        **sizes,
        n_kv_heads=sizes["n_heads"],
        head_dim=head_size(raw, "n_embd", "n_head"),
        norm="layernorm",
        norm_bias=True,
        positions="learned",
        layer_kinds=(LayerKind(),),
        activation=activation(raw.get("activation_function", default_activation)),
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def _read_bigcode(raw: Raw) -> ModelConfig:
    """All queries share one key head, or each has its own."""
    multi_query = raw.get("multi_query", True)
    check_value(multi_query, bool, "multi_query")
    config = _read(raw, "gelu_pytorch_tanh")
    return replace(config, n_kv_heads=1) if multi_query else config


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_fields(config, KEYS), "activation_function": ACTIVATION_NAMES[config.activation]}


GPT2 = FamilySpec(
    name="gpt2",
    models="GPT-2, DistilGPT-2",
    architecture="GPT2LMHeadModel",
    read=_read,
    write=_write,
    names=_NAMES,
    layout=transposed,
    prefix="transformer.",
    ignored=re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"),
)
GPT_BIGCODE = FamilySpec(
    name="gpt_bigcode",
    models="StarCoderBase, SantaCoder",
    architecture="GPTBigCodeForCausalLM",
    read=_read_bigcode,
    names=_NAMES,
    layout=heads_interleaved,
    prefix="transformer.",
    ignored=re.compile(r"(transformer\.)?(h\.\d+\.attn\.)?(bias|masked_bias)"),
)
