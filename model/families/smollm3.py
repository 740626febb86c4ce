"""smollm3: llama with layers that are not rotated, by default every fourth, which may have a window."""

from __future__ import annotations

from collections.abc import Callable

from model.config import ConfigError, LayerKind, ModelConfig, Size, check_field, check_value
from model.families.llama import llama_family, read_attention_biases, read_dialect
from model.families.rope import read_whole_rope
from model.families.spec import Layers, Raw, read_layers, read_windows


def _read(raw: Raw) -> ModelConfig:
    dialect = {**read_attention_biases(raw), "mlp_bias": raw.get("mlp_bias", False)}
    return read_dialect(raw, defaults={"n_kv_heads": 4, "tied_head": True}, layers=_layers(raw), **dialect)


def _layers(raw: Raw) -> Layers:
    is_sliding, types = raw.get("use_sliding_window", False), raw.get("layer_types")
    check_value(is_sliding, bool, "use_sliding_window")
    window = raw.get("sliding_window") if is_sliding else None
    if window is None and isinstance(types, list) and "sliding_attention" in types:
        raise ConfigError("layer_types has sliding_attention, which needs use_sliding_window and sliding_window")
    is_rotated, rope = _is_rotated(raw), read_whole_rope(raw, theta=2e6)
    windows = read_windows(raw, "num_hidden_layers", window, lambda layer: not is_rotated(layer))
    return read_layers(
        len(windows), lambda layer: LayerKind(window=windows[layer], rope=rope if is_rotated(layer) else None)
    )


def _is_rotated(raw: Raw) -> Callable[[int], bool]:
    if (listed := raw.get("no_rope_layers")) is None:
        interval = raw.get("no_rope_layer_interval", 4)
        check_value(interval, Size, "no_rope_layer_interval")
        return lambda layer: (layer + 1) % interval != 0
    check_field("n_layers", count := raw["num_hidden_layers"], "num_hidden_layers")
    if not isinstance(listed, list) or len(listed) < count or any(each not in (0, 1) for each in listed):
        raise ConfigError(
            f"no_rope_layers must be a list of {count} numbers, one for each layer: 1 if it is rotated, 0 if not"
        )
    return lambda layer: bool(listed[layer])


SMOLLM3 = llama_family(name="smollm3", models="SmolLM3 3B", architecture="SmolLM3ForCausalLM", read=_read)
