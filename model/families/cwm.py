"""cwm: llama with a window in three of four layers, and by default with llama3's rotation."""

from __future__ import annotations

from model.config import LayerKind, ModelConfig
from model.families.llama import llama_family, read_dialect
from model.families.rope import read_whole_rope
from model.families.spec import Raw, read_layers, read_windows, require_values

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _read(raw: Raw) -> ModelConfig:
    require_values(raw, attention_bias=False)
    rope = read_whole_rope(raw, theta=1e6, default=_ROPE)
    windows = read_windows(raw, "num_hidden_layers", raw.get("sliding_window", 8192), lambda layer: layer % 4 > 0)
    layers = read_layers(len(windows), lambda layer: LayerKind(window=windows[layer], rope=rope))
    defaults = {"n_kv_heads": 8, "head_dim": 128, "norm_eps": 1e-5}
    return read_dialect(raw, defaults=defaults, layers=layers, mlp_bias=raw.get("mlp_bias", False))


CWM = llama_family(name="cwm", models="CWM 32B", architecture="CwmForCausalLM", read=_read)
