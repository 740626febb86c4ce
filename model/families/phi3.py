"""phi3 (Phi-3, Phi-4): q, k, v and gate, up are one matrix each; heads may be partly rotary, by longrope."""

from __future__ import annotations

from model.config import ModelConfig, Rope, check_field
from model.families.llama import NAMES, llama_family, read_one_window, read_sizes
from model.families.rope import read_rope, read_rotated_dim, rope_parameters
from model.families.spec import Raw, activation, require_values

_NAMES = {
    **NAMES,
    "blocks.N.attention.qkv": "model.layers.N.self_attn.qkv_proj",
    "blocks.N.mlp.up": "model.layers.N.mlp.gate_up_proj",
}
_LONGROPE = ("longrope", "su", "yarn")
"""Its names: the files of the first versions call it su or yarn."""


def _read(raw: Raw) -> ModelConfig:
    require_values(raw, attention_bias=False, mlp_bias=False, lm_head_bias=False)
    sizes = read_sizes(raw, norm_eps=1e-5)
    layers = read_one_window(raw, _read_rope(raw, sizes["head_dim"]))
    return ModelConfig(**sizes, **layers, activation=activation(raw.get("hidden_act", "silu")))


def _read_rope(raw: Raw, head_dim: int) -> Rope:
    rope, original = rope_parameters(raw), raw.get("original_max_position_embeddings", 4096)
    check_field("original_context", original, "original_max_position_embeddings", Rope)
    kinds = (None, "default", *_LONGROPE)
    require_values(rope, rope_type=kinds, type=kinds)
    kind = "longrope" if (rope.get("rope_type") or rope.get("type")) in _LONGROPE else "default"
    renamed = {"rope_parameters": {**rope, "rope_type": kind}, "rope_scaling": None}
    dim = read_rotated_dim(raw, head_dim)
    return read_rope({**raw, **renamed, "original_max_position_embeddings": original}, dim)


PHI3 = llama_family(
    name="phi3",
    models="Phi-3 mini and medium, Phi-3.5 mini, Phi-4 mini, Phi-4 14B",
    architecture="Phi3ForCausalLM",
    read=_read,
    names=_NAMES,
)
