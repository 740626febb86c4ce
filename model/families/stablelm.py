"""stablelm: LayerNorm, partly rotary heads, and optionally a parallel residual with one norm."""

from __future__ import annotations

import re

from model.config import LayerKind, ModelConfig
from model.families.llama import KEYS, NAMES, read_sizes
from model.families.rope import read_rope, read_rotated_dim
from model.families.spec import FamilySpec, Raw, activation, head_size, require_values

_KEYS = {
    **KEYS,
    "norm_eps": "layer_norm_eps",
    "qkv_bias": "use_qkv_bias",
    "parallel_residual": "use_parallel_residual",
}


def _read(raw: Raw) -> ModelConfig:
    require_values(raw, qk_layernorm=False)
    sizes = read_sizes(raw, _KEYS, n_kv_heads=32, norm_eps=1e-5, qkv_bias=False, parallel_residual=False)
    require_values(raw, head_dim=(None, head_size(raw, "hidden_size", "num_attention_heads")))
    rope = read_rope(raw, read_rotated_dim(raw, sizes["head_dim"], default=0.25))
    return ModelConfig(
        **sizes,
        norm="layernorm",
        norm_bias=True,
        shared_norm=sizes["parallel_residual"],
        layer_kinds=(LayerKind(rope=rope),),
        activation=activation(raw.get("hidden_act", "silu")),
    )


STABLELM = FamilySpec(
    name="stablelm",
    models="StableLM 1.6B and 3B",
    architecture="StableLmForCausalLM",
    read=_read,
    names=NAMES,
    prefix="model.",
    ignored=re.compile(r".*rotary_emb\.inv_freq"),
)
