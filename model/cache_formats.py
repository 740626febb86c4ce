"""Formats of keys and values in a KV cache, by the value of --kv-cache. model/nn/int8_cache.py defines the numbers."""

from __future__ import annotations

from typing import Literal

KvCache = Literal["auto", "int8"]
"""auto: in the number format of --dtype. int8: as codes of 8 bits, with a scale for each token and kv head."""
SCALE_BYTES = 2
"""Of a scale, which is a bfloat16: it has the range of the numbers, which float16 lacks. Codes are computed with the
rounded scale, so that its 8 significant bits cost nothing; float32 scales would take 3 % more memory at a head_dim of
64."""
INT8_GOLDEN_TOLERANCE = 0.05
"""How much more than its number format a cache in int8 may differ from golden.json, relative to the mean."""


def check_kv_cache(kv_cache: KvCache, device: str) -> None:
    """Raises ValueError if this kind of device ("cuda") has no cache in this format."""
    if kv_cache != "auto" and device == "cuda":
        raise ValueError(
            f"--kv-cache {kv_cache} requires a CPU, and the device is a GPU, where kernels read keys and values in the "
            "format of --dtype only: use --kv-cache auto, or --device cpu"
        )


def golden_tolerance(of_weights: float | None, kv_cache: KvCache) -> float | None:
    """Largest relative difference from golden.json; None: golden.json's own absolute tolerance.

    of_weights: FormatKind.golden_tolerance.
    """
    return of_weights if kv_cache == "auto" else (of_weights or 0.0) + INT8_GOLDEN_TOLERANCE
