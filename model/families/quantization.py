"""quantization_config of a config.json: what is read, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.config import ConfigError

_HINT = "use the float32, float16 or bfloat16 weights"
_REMEDIES = {
    "mxfp4": "; transformers makes them: from_pretrained(..., quantization_config=Mxfp4Config(dequantize=True)), then "
    "save_pretrained(...)"
}


def check_quantization(raw: Any) -> None:
    """Accepts weights in fp8 (e4m3) with scales of blocks, rows or tensors, which are read as bfloat16.

    Raises ConfigError for other formats.
    """
    if not raw:
        return
    if not isinstance(raw, Mapping):
        raise ConfigError(f"quantization_config must be an object, not {raw!r:.40}")
    method = raw.get("quant_method")
    if method == "fp8" and raw.get("fmt", "e4m3") == "e4m3":
        return
    if method == "compressed-tensors" and raw.get("format") == "float-quantized":
        return
    named = f"{method!r:.40}" + (f" with format {raw['format']!r:.40}" if "format" in raw else "")
    raise ConfigError(
        f"quantized weights (quantization_config, quant_method {named}) are not supported, only fp8 in e4m3; {_HINT}"
        f"{_REMEDIES.get(method, '') if isinstance(method, str) else ''}"
    )
