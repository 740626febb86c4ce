"""gpt_neox: parallel residual, partly rotary heads, and q, k, v interleaved head by head."""

from __future__ import annotations

import re
from functools import partial

from model.config import ConfigError, LayerKind, ModelConfig
from model.families.spec import (
    FamilySpec,
    Raw,
    Tensor,
    TensorMapping,
    activation,
    head_size,
    read_fields,
    read_rope,
    rope_parameters,
)

_NAMES = {
    "embedding": "gpt_neox.embed_in.weight",
    "untied_head": "embed_out.weight",
    "norm": "gpt_neox.final_layer_norm",
    "blocks.N.norm_attention": "gpt_neox.layers.N.input_layernorm",
    "blocks.N.attention.qkv": "gpt_neox.layers.N.attention.query_key_value",
    "blocks.N.attention.out": "gpt_neox.layers.N.attention.dense",
    "blocks.N.norm_mlp": "gpt_neox.layers.N.post_attention_layernorm",
    "blocks.N.mlp.up": "gpt_neox.layers.N.mlp.dense_h_to_4h",
    "blocks.N.mlp.down": "gpt_neox.layers.N.mlp.dense_4h_to_h",
}


def _interleaved(config: ModelConfig, mapping: TensorMapping) -> TensorMapping:
    """The file orders the rows of qkv by head: q, k, v of head 0, then of head 1, ..."""
    if ".attention.qkv." not in mapping.target:
        return mapping
    load, save = partial(_swap, outer=config.n_heads, inner=3), partial(_swap, outer=3, inner=config.n_heads)
    return TensorMapping(mapping.target, mapping.source, load=load, save=save)


def _swap(tensor: Tensor, *, outer: int, inner: int) -> Tensor:
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
    if type(share) not in (int, float) or not 0 <= share <= 1:  # a list or a text times a number may fill the memory
        raise ConfigError(f"rotary_pct (or partial_rotary_factor) cannot be {share!r}: it must be a number from 0 to 1")
    rotary_dim = int(head_dim * share)
    return ModelConfig(
        **sizes,
        n_kv_heads=sizes["n_heads"],
        head_dim=head_dim,
        norm="layernorm",
        norm_bias=True,
        layer_kinds=(LayerKind(rope=read_rope(raw, None if rotary_dim == head_dim else rotary_dim)),),
        activation=activation(raw.get("hidden_act", "gelu")),
        gated=False,
        out_bias=sizes["qkv_bias"],
        mlp_bias=True,
    )


GPT_NEOX = FamilySpec(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    read=_read,
    names=_NAMES,
    layout=_interleaved,
    prefix="gpt_neox.",
    ignored=re.compile(r".*attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
)
