"""exaone4: norms of outputs, queries and keys; in models with a window, layers without it are not rotated."""

from __future__ import annotations

import re

from model.config import LayerKind, ModelConfig
from model.families.llama import NAMES, read_sizes
from model.families.rope import read_whole_rope
from model.families.spec import FamilySpec, Raw, activation, periodic_windows, read_layers, read_windows

_NAMES = {module: name for module, name in NAMES.items() if not module.startswith("blocks.N.norm")}
_NAMES |= {
    "blocks.N.norm_attention_output": "model.layers.N.post_attention_layernorm",
    "blocks.N.norm_mlp_output": "model.layers.N.post_feedforward_layernorm",
}


def _read(raw: Raw) -> ModelConfig:
    window, rope = raw.get("sliding_window", 4096), read_whole_rope(raw)
    default = periodic_windows(raw, "sliding_window_pattern", default=4) if window is not None else lambda _: False
    windows = read_windows(raw, "num_hidden_layers", window, default)

    def kind(layer: int) -> LayerKind:
        is_rotated = window is None or windows[layer] is not None
        return LayerKind(window=windows[layer], rope=rope if is_rotated else None)

    return ModelConfig(
        **read_sizes(raw, n_kv_heads=32, norm_eps=1e-5),
        **read_layers(len(windows), kind),
        norm_position="output",
        qk_norm="head",
        activation=activation(raw.get("hidden_act", "silu")),
    )


EXAONE4 = FamilySpec(
    name="exaone4",
    models="EXAONE 4.0 1.2B",
    architecture="Exaone4ForCausalLM",
    read=_read,
    names=_NAMES,
    prefix="model.",
    ignored=re.compile(r".*rotary_emb\.inv_freq"),
)
