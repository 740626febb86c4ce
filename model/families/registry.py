"""Registry of model families: by the model_type of a config.json, and by the ModelConfigs that they can represent.

NATIVE is our own layout (the fields of ModelConfig, our tensor names), for decoders that no Hugging Face family covers.
"""

from __future__ import annotations

import re
from dataclasses import asdict, fields
from typing import Any

from model.config import MODEL_TYPES, ConfigError, ModelConfig, RopeScaling, check_model_type
from model.families.gpt2 import GPT2
from model.families.gpt_neox import GPT_NEOX
from model.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from model.families.spec import FamilySpec, Raw, TensorMapping, single
from model.parameter_shapes import parameter_shapes

_FIELDS = {field.name for field in fields(ModelConfig)}
_METADATA_KEYS = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version"}
_TOKEN_KEYS = {"bos_token_id", "eos_token_id", "pad_token_id"}


def _native_mappings(config: ModelConfig) -> list[TensorMapping]:
    return [single(name, name, *shape) for name, shape in parameter_shapes(config).items()]


def _read_native(raw: Raw) -> ModelConfig:
    if unknown := sorted(raw.keys() - _FIELDS - _METADATA_KEYS - _TOKEN_KEYS):
        raise ConfigError(f"unknown key {unknown[0]!r}; allowed: {', '.join(sorted(_FIELDS))}")
    values = {name: value for name, value in raw.items() if name in _FIELDS}
    if scaling := values.get("rope_scaling"):
        values["rope_scaling"] = RopeScaling(**scaling)
    return ModelConfig(**values)


def _write_native(config: ModelConfig) -> dict[str, Any]:
    return asdict(config)


NATIVE = FamilySpec(
    name="inkstream", architecture="InkstreamDecoder", read=_read_native, write=_write_native, mappings=_native_mappings
)


# If several families can represent a config, family_of() picks the first.
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
        raise ConfigError(_describe(error)) from None


def family_of(config: ModelConfig) -> FamilySpec:
    """The first family whose config.json can represent `config`, so that as many programs as possible can read it."""
    for family in _FAMILIES.values():
        try:
            if _read(family, family.write(config)) == config:
                return family
        except ConfigError:
            continue
    raise AssertionError("the native layout represents every config")


def write_config(config: ModelConfig, dtype: str, eos_id: int | None) -> dict[str, Any]:
    """The config.json of `config` in the format of family_of(config)."""
    family = family_of(config)
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        **family.write(config),
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
    }


def _read(family: FamilySpec, raw: Raw) -> ModelConfig:
    config = family.read(raw)
    if family is not NATIVE and not config.mlp_width:
        raise ConfigError(f"a {family.name} without feed-forward is not supported")
    return config


def _describe(error: Exception) -> str:
    """User-facing message of a Python error: lists missing keys, else reports a value of the wrong type."""
    if missing := re.search(r"missing \d+ required keyword-only arguments?: (.*)", str(error)):
        return f"keys are missing: {missing.group(1)}"
    return f"a value has the wrong type ({error})"
