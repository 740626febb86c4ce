"""Rotations of GGUF files, as the rope_parameters of a config.json."""

from __future__ import annotations

import math
from typing import Any

from model.config import ConfigError
from model.gguf.metadata_reader import MetadataReader

_CONTEXTS = tuple(2**power for power in range(4, 21))
"""Of pretraining, from which files have factors of frequencies only; most are of 8,192."""
_TOLERANCE = 1e-5
_HAVE_LOG_MULTIPLIER = ("mistral3",)
"""Architectures whose files say what YaRN's factor of attention scores is divided by."""


def read_rotation(keys: MetadataReader, head_dim: int) -> dict[str, Any]:
    """rope_parameters, with rope_theta. Raises ConfigError."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 10_000.0)}
    kind = keys.get("rope.scaling.type")
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    original = keys.get("rope.scaling.original_context_length")
    attention_factor = _attention_factor(keys)
    multiplier = keys.get("rope.scaling.yarn_log_multiplier")
    if multiplier and (kind != "yarn" or keys.architecture not in _HAVE_LOG_MULTIPLIER):
        raise ConfigError(
            f"{keys.architecture}.rope.scaling.yarn_log_multiplier is only supported with the type yarn in models of "
            f"{', '.join(_HAVE_LOG_MULTIPLIER)}"
        )
    if type(factor) not in (int, float) or not 0 < factor < 1e9:
        raise ConfigError(f"{keys.architecture}.rope.scaling.factor cannot be {factor!r:.40}")
    betas = {name: keys.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    context = {"original_max_position_embeddings": original or keys.require("context_length")}
    factors, short = keys.floats("rope_factors_long.weight"), keys.floats("rope_factors_short.weight")
    if bool(factors) != bool(short):
        raise ConfigError("rope_factors_long.weight and rope_factors_short.weight are only supported together")
    if kind != "yarn" and any(beta is not None for beta in betas.values()):
        raise ConfigError(f"{keys.architecture}.rope.scaling.yarn_beta_fast and yarn_beta_slow need the type yarn")
    if factors:
        if kind not in (None, "none", "longrope") or factor != 1.0:
            raise ConfigError(
                f"{keys.architecture}.rope.scaling.type {kind!r:.40} with the factor {factor!r:.40} is not supported "
                "together with rope_factors_long.weight"
            )
        rope |= {"rope_type": "longrope", "long_factor": factors, "short_factor": short, **context}
        return rope | {"attention_factor": 1.0 if attention_factor is None else attention_factor}
    if kind != "yarn" and attention_factor not in (None, 1.0):
        raise ConfigError(
            f"{keys.architecture}.rope.scaling.attn_factor {attention_factor!r:.40} is only supported with yarn"
        )
    if kind in (None, "linear") and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, **context}
        rope |= {name: beta for name, beta in betas.items() if beta is not None}
        rope |= {"mscale": 1.0, "mscale_all_dim": multiplier} if multiplier else {}
        _check_yarn(keys, 1.0 if multiplier else factor, attention_factor)
    elif kind not in (None, "none", "linear"):
        raise ConfigError(f"{keys.architecture}.rope.scaling.type {kind!r:.40} is not supported")
    if frequencies := keys.floats("rope_freqs.weight"):
        if rope["rope_type"] != "default":
            raise ConfigError("rope_freqs.weight is not supported together with a rope scaling")
        return _scaled_frequencies(rope, frequencies, head_dim)
    return rope


def _attention_factor(keys: MetadataReader) -> Any:
    """The factor of attention scores, which has two names."""
    names = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
    found = {value for name in names if (value := keys.get(name)) is not None}
    if len(found) > 1:
        raise ConfigError(f"{keys.architecture}.{names[0]} and {names[1]} differ")
    return found.pop() if found else None


def _check_yarn(keys: MetadataReader, factor: float, attention_factor: Any) -> None:
    """Files have the factor that is usual for YaRN, as a whole or as a multiple of it; others are not supported.

    factor: 1 if a log multiplier makes the factor of attention scores, by which it may only be multiplied.
    """
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    if attention_factor is not None and not any(
        math.isclose(attention_factor, number, rel_tol=1e-4) for number in (1.0, usual)
    ):
        raise ConfigError(f"{keys.architecture}.rope.scaling.attn_factor {attention_factor!r:.40} is not supported")


def _scaled_frequencies(rope: dict[str, Any], factors: list[float], head_dim: int) -> dict[str, Any]:
    """llama3's rule if it makes these factors, or longrope with the factors themselves: the wavelengths are equal."""
    base, largest = rope["rope_theta"], max(factors)
    if type(base) in (int, float) and base >= 1 and len(factors) * 2 <= head_dim:
        for context in sorted(_CONTEXTS, key=lambda context: context != 8192):
            expected = [_llama3(base ** (2 * i / (2 * len(factors))), largest, context) for i in range(len(factors))]
            if all(math.isclose(*pair, rel_tol=_TOLERANCE) for pair in zip(factors, expected, strict=True)):
                found = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": context}
                return {**rope, "rope_type": "llama3", "factor": largest, **found}
    context_free = {"attention_factor": 1.0, "original_max_position_embeddings": 1}
    return {**rope, "rope_type": "longrope", "short_factor": factors, "long_factor": factors, **context_free}


def _llama3(inverse_frequency: float, factor: float, context: int) -> float:
    wavelength = 2 * math.pi * inverse_frequency
    if wavelength < context / 4.0:
        return 1.0
    if wavelength > context:
        return factor
    smooth = (context / wavelength - 1.0) / 3.0
    return 1 / ((1 - smooth) / factor + smooth)


def rotated_share(keys: MetadataReader, head_dim: int) -> float:
    """partial_rotary_factor: the part of each head that is rotated. Raises ConfigError."""
    dim = keys.get("rope.dimension_count", head_dim)
    if type(dim) is not int or not 0 < dim <= head_dim:
        raise ConfigError(f"{keys.architecture}.rope.dimension_count {dim!r:.40} is not from 1 to {head_dim}")
    share = dim / head_dim
    return share if int(head_dim * share) == dim else math.nextafter(share, 1.0)
