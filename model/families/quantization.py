"""quantization_config of a config.json: what is read, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.config import ConfigError

_SUPPORTED = (
    "fp8 in e4m3, AWQ (gemm), GPTQ of 4 or 8 bits, MXFP4, compressed-tensors (pack-quantized, int-quantized, "
    "float-quantized)"
)
_HINT = "use the float32, float16 or bfloat16 weights, or a GGUF file"
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How the matrices of a checkpoint were quantized; each tensor's own shape says the rest."""

    method: str = "none"
    """quant_method: awq, gptq, compressed-tensors, mxfp4, fp8."""
    stores_zero_points: bool = True
    """Whether zero points are stored as they are: the first format of GPTQ subtracts 1."""


NOT_QUANTIZED = Quantization()


def read_quantization(raw: Any) -> Quantization:
    """Raises ConfigError for formats that are not read. raw: the quantization_config; empty for none.

    fp8 (e4m3) with scales of blocks, rows or tensors becomes bfloat16.
    """
    if not raw:
        return NOT_QUANTIZED
    if not isinstance(raw, Mapping):
        raise ConfigError(f"quantization_config must be an object, not {raw!r:.40}")
    match raw.get("quant_method"):
        case "fp8" if raw.get("fmt", "e4m3") == "e4m3":
            return Quantization(method="fp8")
        case "compressed-tensors" if raw.get("format") in _COMPRESSED:
            return Quantization(method="compressed-tensors")
        case "mxfp4":
            return Quantization(method="mxfp4")
        case "awq":
            version = raw.get("version", "gemm")
            if not isinstance(version, str) or version.lower() != "gemm":
                raise ConfigError(f"AWQ weights of version {version!r:.40} are not supported, only gemm; {_HINT}")
            return Quantization(method="awq")
        case "gptq":
            layout = raw.get("checkpoint_format", "gptq")
            if layout not in ("gptq", "gptq_v2"):
                raise ConfigError(
                    f"GPTQ weights of checkpoint_format {layout!r:.40} are not supported, only gptq, gptq_v2; {_HINT}"
                )
            return Quantization(method="gptq", stores_zero_points=layout == "gptq_v2")
    named = f"{raw.get('quant_method')!r:.40}" + (f" with format {raw['format']!r:.40}" if "format" in raw else "")
    raise ConfigError(
        f"quantized weights (quantization_config, quant_method {named}) are not supported, only {_SUPPORTED}; {_HINT}"
    )
