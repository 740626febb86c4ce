"""Registry of model families: by the model_type of a config.json, and by the ModelConfigs that they can represent.

NATIVE is our own layout (the fields of ModelConfig, our tensor names), for decoders that no Hugging Face family covers.
"""

from __future__ import annotations

import contextlib
from dataclasses import MISSING, asdict, fields
from typing import Any

from model.config import MODEL_TYPES, ConfigError, ModelConfig, RopeScaling, check_model_type
from model.families.gpt2 import GPT2
from model.families.gpt_neox import GPT_NEOX
from model.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from model.families.spec import FamilySpec, Raw

_FIELDS = {field.name: field for field in fields(ModelConfig)}
_METADATA_KEYS = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version"}
_METADATA_KEYS |= {"bos_token_id", "eos_token_id", "pad_token_id"}


def _read_native(raw: Raw) -> ModelConfig:
    if unknown := sorted(raw.keys() - _FIELDS.keys() - _METADATA_KEYS):
        raise ConfigError(f"unknown key {unknown[0]!r}; allowed: {', '.join(sorted(_FIELDS))}")
    required = {name for name, field in _FIELDS.items() if field.default is MISSING}
    if missing := sorted(required - raw.keys()):
        raise ConfigError(f"keys are missing: {', '.join(missing)}")
    values = {name: value for name, value in raw.items() if name in _FIELDS}
    if scaling := values.get("rope_scaling"):
        values["rope_scaling"] = RopeScaling(**scaling)
    return ModelConfig(**values)


NATIVE = FamilySpec(name="inkstream", architecture="InkstreamDecoder", read=_read_native, write=asdict)


_FAMILIES = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, GPT_NEOX, NATIVE)}
assert _FAMILIES.keys() == set(MODEL_TYPES), "MODEL_TYPES of model/config.py lists the families"


def read_config(raw: Raw) -> tuple[FamilySpec, ModelConfig]:
    """Family and config of a config.json (keys of transformers 4 and 5). Raises ConfigError."""
    check_model_type(raw)
    family = _FAMILIES[raw["model_type"]]
    try:
        return family, _read(family, raw)
    except ConfigError:
        raise
    except KeyError as error:
        raise ConfigError(f"the key {error.args[0]!r} is missing") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigError(f"a value has the wrong type ({error})") from None


def family_of(config: ModelConfig) -> FamilySpec:
    """The first family whose config.json can represent `config`, so that as many programs as possible can read it."""
    return _written(config)[0]


def write_config(config: ModelConfig, dtype: str, eos_id: int | None) -> dict[str, Any]:
    """The config.json of `config` in the format of family_of(config)."""
    family, raw = _written(config)
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        **raw,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
    }


def _written(config: ModelConfig) -> tuple[FamilySpec, dict[str, Any]]:
    for family in _FAMILIES.values():
        if family.write:
            raw = family.write(config)
            with contextlib.suppress(ConfigError):
                if _read(family, raw) == config:
                    return family, raw
    raise AssertionError("the native layout represents every config")


def _read(family: FamilySpec, raw: Raw) -> ModelConfig:
    config = family.read(raw)
    if family is not NATIVE and not config.mlp_width:
        raise ConfigError(f"a {family.name} without feed-forward is not supported")
    return config
