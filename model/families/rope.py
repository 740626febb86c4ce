"""Rotations of a config.json, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from model.config import ConfigError, Rope, check_field
from model.families.spec import Raw, require_values

_KINDS = {"default": "default", "dynamic": "default", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
_KINDS |= {"longrope": "longrope", "su": "longrope"}
"""Names in the files. `dynamic` changes nothing up to the model's own context, which is the longest one served."""


def rope_parameters(raw: Raw, layer_type: str | None = None) -> Mapping[str, Any]:
    """rope_parameters of transformers 5, or rope_scaling of older versions, which wins if both are present.

    layer_type: of the layers in question, where these have rotations of their own. Raises ConfigError.
    """
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"the rope scaling must be an object, not {rope!r:.40}")
    if layer_type and isinstance(of_type := rope.get(layer_type), Mapping):
        return of_type
    return rope


def read_rotated_dim(raw: Raw, head_dim: int, *keys: str, default: float = 1.0) -> int | None:
    """Numbers of each head that are rotated, None for all: from partial_rotary_factor or another of `keys`.

    Raises ConfigError.
    """
    names = ("partial_rotary_factor", *keys)
    places = [(key, place[key]) for place in (rope_parameters(raw), raw) for key in names if key in place]
    key, share = next(((key, value) for key, value in places if value is not None), (names[-1], default))
    if type(share) not in (int, float) or not 0 <= share <= 1:  # a list or a text times a number may fill the memory
        named = " (or ".join(dict.fromkeys((key, *reversed(names)))) + ")" * (len(names) > 1)
        raise ConfigError(f"{named} cannot be {share!r:.40}: it must be a number from 0 to 1")
    dim = int(head_dim * share)
    return None if dim == head_dim else dim


def read_rope(
    raw: Raw,
    dim: int | None = None,
    *,
    layer_type: str | None = None,
    theta: float = 10_000.0,
    default: Mapping[str, Any] | None = None,
) -> Rope:
    """The rotation of a config.json of transformers 4 or 5. Raises ConfigError, KeyError.

    dim: see Rope. layer_type: see rope_parameters(). theta: the base without a key for it. default: the object in place
    of a missing or empty one. A family with several rotations that have other keys makes these itself, as
    Rope(theta=...).
    """
    rope = rope_parameters(raw, layer_type) or default or {}
    places = ((rope, "rope_theta"), (raw, "rotary_emb_base"), (raw, "rope_theta"))
    bases = ((key, place[key]) for place, key in places if place.get(key) is not None)
    key, base = next(bases, ("rope_theta", theta))
    check_field("theta", base, key, Rope)
    named = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(named, str) or named not in _KINDS:
        raise ConfigError(f"rope scaling {named!r:.40} is not supported; supported: {', '.join(_KINDS)}")
    match kind := _KINDS[named]:
        case "default":
            return Rope(theta=base, dim=dim)
        case "linear":
            return Rope(theta=base, dim=dim, kind=kind, factor=rope["factor"])
    original = read_original_context(raw, rope)
    fields: dict[str, Any] = {"theta": base, "dim": dim, "kind": kind, "original_context": original}
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return Rope(**fields, **{name: rope[name] for name in names})
    factor = rope.get("factor")
    if factor is None:
        check_field("original_context", raw["max_position_embeddings"], "max_position_embeddings", Rope)
        factor = raw["max_position_embeddings"] / original
    check_field("factor", factor, "factor of the rope scaling", Rope)
    if kind == "yarn":
        fields |= {name: rope[name] for name in ("beta_fast", "beta_slow") if rope.get(name)} | {
            "truncate": rope.get("truncate", True)
        }
        return Rope(**fields, factor=factor, attention_factor=_yarn_attention_factor(rope, factor))
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    for field, name in (("short_factors", "short_factor"), ("long_factors", "long_factor")):
        if not isinstance(rope[name], list | tuple):
            raise ConfigError(f"{name} of the rope scaling must be a list of numbers")
        fields[field] = tuple(rope[name])
    return Rope(**fields, attention_factor=attention_factor)


def read_whole_rope(
    raw: Raw,
    *,
    layer_type: str | None = None,
    theta: float = 10_000.0,
    default: Mapping[str, Any] | None = None,
) -> Rope:
    """read_rope() of families that rotate whole heads. Raises ConfigError if only a part is rotated."""
    for section in (raw, rope_parameters(raw, layer_type)):
        require_values(section, partial_rotary_factor=(1.0, None))
    return read_rope(raw, layer_type=layer_type, theta=theta, default=default)


def check_ropes_by_type(raw: Raw) -> None:
    """Raises ConfigError unless rope_parameters is missing, or has an object for types of attention."""
    by_type = raw.get("rope_parameters") or {}
    if not isinstance(by_type, dict) or by_type.keys() - {"full_attention", "sliding_attention"}:
        raise ConfigError("rope_parameters must name the rotations of full_attention and sliding_attention")
    if any(rope is not None and not isinstance(rope, dict) for rope in by_type.values()):
        raise ConfigError("full_attention and sliding_attention of rope_parameters must be objects")


def read_original_context(raw: Raw, rope: Mapping[str, Any]) -> int:
    """Context of the pretraining, by default the model's own. Raises ConfigError, KeyError."""
    key = "original_max_position_embeddings"
    original: int = raw.get(key) or rope.get(key) or raw["max_position_embeddings"]
    check_field("original_context", original, key, Rope)
    return original


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> Any:
    """arXiv:2309.00071, 3.4; DeepSeek's checkpoints name the weights of two such factors."""
    if (given := rope.get("attention_factor")) is not None:
        return given

    def scaled(weight: Any) -> float:
        check_field("attention_factor", weight, "mscale or mscale_all_dim of the rope scaling", Rope)
        return 0.1 * float(weight) * math.log(factor) + 1.0 if factor > 1 else 1.0

    first, second = rope.get("mscale"), rope.get("mscale_all_dim")
    return scaled(first) / scaled(second) if first and second else scaled(1.0)


def write_rope(rope: Rope) -> dict[str, Any]:
    """RoPE keys for transformers 4 and 5."""
    keys: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        keys["factor"] = rope.factor
    if rope.kind == "llama3":
        keys["low_freq_factor"], keys["high_freq_factor"] = rope.low_freq_factor, rope.high_freq_factor
    if rope.kind == "yarn":
        names = ("beta_fast", "beta_slow", "truncate", "attention_factor")
        keys |= {name: getattr(rope, name) for name in names}
    if rope.kind in ("llama3", "yarn"):
        keys["original_max_position_embeddings"] = rope.original_context
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else keys,
        "rope_parameters": {**keys, "rope_theta": rope.theta},
    }
