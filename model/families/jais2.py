"""jais2: llama with LayerNorm, biases everywhere, and a feed-forward of squared relu without a gate."""

from __future__ import annotations

from model.config import LayerKind, ModelConfig
from model.families.llama import KEYS, NAMES, llama_family, read_sizes
from model.families.rope import read_whole_rope
from model.families.spec import Raw, activation

_KEYS = {**KEYS, "norm_eps": "layer_norm_eps", "qkv_bias": "attention_bias", "mlp_bias": "mlp_bias"}


def _read(raw: Raw) -> ModelConfig:
    sizes = read_sizes(raw, _KEYS, norm_eps=1e-5, qkv_bias=True, mlp_bias=True)
    return ModelConfig(
        **sizes,
        norm="layernorm",
        norm_bias=True,
        layer_kinds=(LayerKind(rope=read_whole_rope(raw)),),
        activation=activation(raw.get("hidden_act", "relu2")),
        gated=False,
        out_bias=sizes["qkv_bias"],
    )


JAIS2 = llama_family(
    name="jais2",
    models="Jais 2, 8B",
    architecture="Jais2ForCausalLM",
    read=_read,
    names={**NAMES, "blocks.N.mlp.up": "model.layers.N.mlp.up_proj"},
)
