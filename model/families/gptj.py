"""gptj: a parallel residual with one norm, and rotations of neighboring numbers of a head."""

from __future__ import annotations

import re

from model.config import LayerKind, ModelConfig, Rope, Size, check_value
from model.families.gpt2 import KEYS
from model.families.layouts import rotation_interleaved
from model.families.spec import FamilySpec, Raw, activation, head_size, read_fields

_LAYER = "transformer.h.N"
_NAMES: dict[str, str | tuple[str, ...]] = {
    "embedding": "transformer.wte.weight",
    "untied_head": "lm_head.weight",
    "head_bias": "lm_head.bias",
    "norm": "transformer.ln_f",
    "blocks.N.norm_attention": f"{_LAYER}.ln_1",
    "blocks.N.attention.qkv": tuple(f"{_LAYER}.attn.{part}_proj" for part in "qkv"),
    "blocks.N.attention.out": f"{_LAYER}.attn.out_proj",
    "blocks.N.mlp.up": f"{_LAYER}.mlp.fc_in",
    "blocks.N.mlp.down": f"{_LAYER}.mlp.fc_out",
}


def _read(raw: Raw) -> ModelConfig:
    sizes = read_fields(raw, KEYS, mlp_width=None, norm_eps=1e-5, tied_head=False)
    sizes["mlp_width"] = sizes["mlp_width"] or 4 * sizes["width"]
    rotary_dim = raw.get("rotary_dim", 64)
    check_value(rotary_dim, Size, "rotary_dim")
    return ModelConfig(
        **sizes,
        n_kv_heads=sizes["n_heads"],
        head_dim=head_size(raw, "n_embd", "n_head"),
        norm="layernorm",
        norm_bias=True,
        parallel_residual=True,
        shared_norm=True,
        layer_kinds=(LayerKind(rope=Rope(dim=rotary_dim)),),
        activation=activation(raw.get("activation_function", "gelu_new")),
        gated=False,
        mlp_bias=True,
        head_bias=True,
    )


GPTJ = FamilySpec(
    name="gptj",
    models="GPT-J 6B",
    architecture="GPTJForCausalLM",
    read=_read,
    names=_NAMES,
    layout=rotation_interleaved,
    prefix="transformer.",
    ignored=re.compile(r".*attn\.(bias|masked_bias|embed_positions)"),
)
