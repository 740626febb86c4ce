"""falcon: a parallel residual, and queries, keys and values in one matrix, ordered by key head."""

from __future__ import annotations

import re
from typing import Any

from model.config import LayerKind, ModelConfig, check_field, check_value
from model.families.layouts import heads_interleaved
from model.families.rope import read_whole_rope
from model.families.spec import FamilySpec, Raw, TensorMapping, activation, head_size, read_fields, require_values

_LAYER = "transformer.h.N"
_NAMES = {
    "embedding": "transformer.word_embeddings.weight",
    "untied_head": "lm_head.weight",
    "norm": "transformer.ln_f",
    "blocks.N.norm_attention": f"{_LAYER}.input_layernorm",
    "blocks.N.attention.qkv": f"{_LAYER}.self_attention.query_key_value",
    "blocks.N.attention.out": f"{_LAYER}.self_attention.dense",
    "blocks.N.norm_mlp": f"{_LAYER}.post_attention_layernorm",
    "blocks.N.mlp.up": f"{_LAYER}.mlp.dense_h_to_4h",
    "blocks.N.mlp.down": f"{_LAYER}.mlp.dense_4h_to_h",
}
_TWO_NORMS = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
"""Names of the norms where a parallel residual has two."""
_KEYS = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "mlp_width": "ffn_hidden_size",
    "context": "max_position_embeddings",
    "norm_eps": "layer_norm_epsilon",
    "qkv_bias": "bias",
    "parallel_residual": "parallel_attn",
    "tied_head": "tie_word_embeddings",
}
_DEFAULTS: dict[str, Any] = {"mlp_width": None, "context": 2048, "norm_eps": 1e-5, "qkv_bias": False}
_DEFAULTS |= {"parallel_residual": True, "tied_head": True}


def _read(raw: Raw) -> ModelConfig:
    require_values(raw, alibi=(False, None))
    sizes = read_fields(raw, _KEYS, **_DEFAULTS)
    is_new = _flag(raw, "new_decoder_architecture", default=False)
    if is_new:
        require_values(raw, parallel_attn=True)
    require_values(raw, num_ln_in_parallel_attn=(None, 1, 2) if is_new else (None, 1))
    has_two_norms = is_new and raw.get("num_ln_in_parallel_attn") != 1
    return ModelConfig(
        **{**sizes, "mlp_width": sizes["mlp_width"] or 4 * sizes["width"]},
        n_kv_heads=_n_kv_heads(raw, sizes["n_heads"], is_new=is_new),
        head_dim=head_size(raw, "hidden_size", "num_attention_heads"),
        norm="layernorm",
        norm_bias=True,
        shared_norm=sizes["parallel_residual"] and not has_two_norms,
        layer_kinds=(LayerKind(rope=read_whole_rope(raw)),),
        activation=activation(raw.get("activation", "gelu")),
        gated=False,
        out_bias=sizes["qkv_bias"],
        mlp_bias=sizes["qkv_bias"],
    )


def _flag(raw: Raw, key: str, *, default: bool) -> bool:
    value = raw.get(key, default)
    check_value(value, bool, key)
    return bool(value)


def _n_kv_heads(raw: Raw, n_heads: int, *, is_new: bool) -> Any:
    """num_kv_heads counts only in the new architecture: the files of others name all heads."""
    if is_new:
        given = raw.get("num_kv_heads")
        check_field("n_kv_heads", n_heads if given is None else given, "num_kv_heads")
        return n_heads if given is None else given
    if _flag(raw, "multi_query", default=True):
        return 1
    require_values(raw, num_kv_heads=(None, n_heads))
    return n_heads


def _layout(config: ModelConfig, mapping: TensorMapping) -> TensorMapping:
    mapping = heads_interleaved(config, mapping)
    if not config.parallel_residual or config.shared_norm:
        return mapping
    return mapping.renamed(lambda name: re.sub("|".join(_TWO_NORMS), lambda found: _TWO_NORMS[found[0]], name))


FALCON = FamilySpec(
    name="falcon",
    models="Falcon 7B, 11B, 40B",
    architecture="FalconForCausalLM",
    read=_read,
    names=_NAMES,
    layout=_layout,
    prefix="transformer.",
    ignored=re.compile(r".*(maybe_rotary|rotary|rotary_emb)\.inv_freq"),
)
