"""The sampling defaults that a generation_config.json brings. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.common.params import SamplingParams

_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(generation: Mapping[str, Any], path: Path) -> dict[str, float]:
    """The values it sets, by the names of the request's fields. Raises ValueError for one outside its range.

    path: where it stands, for messages.
    """
    given = {key: generation[key] for key in _KEYS if generation.get(key) is not None}
    if generation.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        for key, value in given.items():
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ValueError(f"{key} must be a number, not {value!r:.40}")
        SamplingParams(**{**given, "top_k": max(0, int(given.get("top_k", 0)))})
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {error}") from None
    return {key: float(value) for key, value in given.items()}
