"""opt: learned positions, with a table that begins with two unused rows. Not opt-350m, which has other norms."""

from __future__ import annotations

from model.config import LayerKind, ModelConfig
from model.families.layouts import positions_from
from model.families.spec import FamilySpec, Raw, activation, head_size, read_fields, require_values

_LAYER = "model.decoder.layers.N"
_NAMES: dict[str, str | tuple[str, ...]] = {
    "embedding": "model.decoder.embed_tokens.weight",
    "position_embedding": "model.decoder.embed_positions.weight",
    "untied_head": "lm_head.weight",
    "norm": "model.decoder.final_layer_norm",
    "blocks.N.norm_attention": f"{_LAYER}.self_attn_layer_norm",
    "blocks.N.attention.qkv": tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv"),
    "blocks.N.attention.out": f"{_LAYER}.self_attn.out_proj",
    "blocks.N.norm_mlp": f"{_LAYER}.final_layer_norm",
    "blocks.N.mlp.up": f"{_LAYER}.fc1",
    "blocks.N.mlp.down": f"{_LAYER}.fc2",
}
_KEYS = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "mlp_width": "ffn_dim",
    "context": "max_position_embeddings",
    "tied_head": "tie_word_embeddings",
    "qkv_bias": "enable_bias",
    "norm_weight": "layer_norm_elementwise_affine",
}


def _read(raw: Raw) -> ModelConfig:
    sizes = read_fields(raw, _KEYS, tied_head=True, qkv_bias=True, norm_weight=True)
    require_values(raw, word_embed_proj_dim=(None, sizes["width"]))
    require_values(raw, do_layer_norm_before=True, _remove_final_layer_norm=False)
    return ModelConfig(
        **sizes,
        n_kv_heads=sizes["n_heads"],
        head_dim=head_size(raw, "hidden_size", "num_attention_heads"),
        norm="layernorm",
        norm_bias=sizes["norm_weight"],
        positions="learned",
        layer_kinds=(LayerKind(),),
        activation=activation(raw.get("activation_function", "relu")),
        gated=False,
        out_bias=sizes["qkv_bias"],
        mlp_bias=sizes["qkv_bias"],
    )


OPT = FamilySpec(
    name="opt",
    models="OPT 125M and 1.3B to 13B",
    architecture="OPTForCausalLM",
    read=_read,
    names=_NAMES,
    layout=positions_from(2),
    prefix="model.",
)
