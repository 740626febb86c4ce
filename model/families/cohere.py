"""cohere2: parallel residual with one norm; layers with a window are rotated, the others are not."""

from __future__ import annotations

import re

from model.config import LayerKind, ModelConfig
from model.families.layouts import rotation_interleaved
from model.families.llama import KEYS, NAMES, read_sizes
from model.families.rope import read_whole_rope
from model.families.spec import (
    FamilySpec,
    Raw,
    activation,
    periodic_windows,
    read_layers,
    read_windows,
    require_values,
)

_KEYS = {**KEYS, "norm_eps": "layer_norm_eps", "qkv_bias": "attention_bias", "logit_scale": "logit_scale"}


def _read(raw: Raw) -> ModelConfig:
    require_values(raw, use_qk_norm=False, use_parallel_block=True, use_gated_activation=True)
    require_values(raw, position_embedding_type="rope_gptj", rotary_pct=1.0)
    sizes = read_sizes(raw, _KEYS, norm_eps=1e-5, tied_head=True, qkv_bias=False, logit_scale=0.0625)
    window, rope = raw.get("sliding_window", 4096), read_whole_rope(raw)
    windows = read_windows(raw, "num_hidden_layers", window, periodic_windows(raw, "sliding_window_pattern", default=4))
    return ModelConfig(
        **sizes,
        **read_layers(
            len(windows), lambda layer: LayerKind(window=windows[layer], rope=rope if windows[layer] else None)
        ),
        norm="layernorm",
        parallel_residual=True,
        shared_norm=True,
        activation=activation(raw.get("hidden_act", "silu")),
        out_bias=sizes["qkv_bias"],
    )


COHERE2 = FamilySpec(
    name="cohere2",
    models="Command R7B",
    architecture="Cohere2ForCausalLM",
    read=_read,
    names={module: name for module, name in NAMES.items() if module != "blocks.N.norm_mlp"},
    layout=rotation_interleaved,
    prefix="model.",
    ignored=re.compile(r".*rotary_emb\.inv_freq"),
)
