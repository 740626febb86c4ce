"""gpt_neox: parallel residual, partly rotary heads, and q, k, v interleaved head by head."""

from __future__ import annotations

import re

from model.config import LayerKind, ModelConfig
from model.families.layouts import heads_interleaved
from model.families.rope import read_rope, read_rotated_dim
from model.families.spec import FamilySpec, Raw, activation, head_size, read_fields

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
    rotary_dim = read_rotated_dim(raw, head_dim, "rotary_pct", default=0.25)
    return ModelConfig(
        **sizes,
        n_kv_heads=sizes["n_heads"],
        head_dim=head_dim,
        norm="layernorm",
        norm_bias=True,
        layer_kinds=(LayerKind(rope=read_rope(raw, rotary_dim)),),
        activation=activation(raw.get("hidden_act", "gelu")),
        gated=False,
        out_bias=sizes["qkv_bias"],
        mlp_bias=True,
    )


GPT_NEOX = FamilySpec(
    name="gpt_neox",
    models="Pythia, GPT-NeoX, Dolly",
    architecture="GPTNeoXForCausalLM",
    read=_read,
    names=_NAMES,
    layout=heads_interleaved,
    prefix="gpt_neox.",
    ignored=re.compile(r".*attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
)
