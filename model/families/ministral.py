"""ministral: mistral with windows by layer."""

from __future__ import annotations

from model.config import LayerKind, ModelConfig
from model.families.llama import llama_family, read_dialect
from model.families.rope import read_whole_rope
from model.families.spec import Raw, read_layers, read_windows


def _read(raw: Raw) -> ModelConfig:
    rope = read_whole_rope(raw)
    windows = read_windows(raw, "num_hidden_layers", raw.get("sliding_window", 4096), lambda _: True)
    layers = read_layers(len(windows), lambda layer: LayerKind(window=windows[layer], rope=rope))
    return read_dialect(raw, defaults={"n_kv_heads": 8}, layers=layers)


MINISTRAL = llama_family(name="ministral", models="Ministral 8B", architecture="MinistralForCausalLM", read=_read)
