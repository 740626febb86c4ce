"""Registry of model families: by the model_type of a config.json, and by what a ModelConfig can be written as.

Decoders that no Hugging Face family describes have our own layout, NATIVE: ModelConfig's fields and our tensor names.
"""

from __future__ import annotations

import re
from dataclasses import asdict, fields
from typing import Any

import torch

from model.config import ConfigError, ModelConfig, RopeScaling
from model.families.gpt2 import GPT2
from model.families.gpt_neox import GPT_NEOX
from model.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from model.families.spec import FamilySpec, Raw, TensorMapping, single
from model.nn.transformer import Decoder

_FIELDS = {field.name for field in fields(ModelConfig)}
_ABOUT_FILES = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version"}
_TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id"}


def _native_pieces(config: ModelConfig) -> list[TensorMapping]:
    with torch.device("meta"):
        state = Decoder(config).state_dict()
    return [single(name, name, *tensor.shape) for name, tensor in state.items()]


def _read_native(raw: Raw) -> ModelConfig:
    if unknown := sorted(raw.keys() - _FIELDS - _ABOUT_FILES - _TOKENS):
        raise ConfigError(f"the key {unknown[0]!r} is unknown; known are {', '.join(sorted(_FIELDS))}")
    values = {name: value for name, value in raw.items() if name in _FIELDS}
    if scaling := values.get("rope_scaling"):
        values["rope_scaling"] = RopeScaling(**scaling)
    return ModelConfig(**values)


def _write_native(config: ModelConfig) -> dict[str, Any]:
    return asdict(config)


NATIVE = FamilySpec(
    name="inkstream", architecture="InkstreamDecoder", read=_read_native, write=_write_native, pieces=_native_pieces
)


# Where several can tell a shape, the first one does.
_FAMILIES = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, GPT_NEOX, NATIVE)}
SUPPORTED = tuple(_FAMILIES)


def read_config(raw: Raw) -> tuple[FamilySpec, ModelConfig]:
    """The family and shape of a config.json (keys of transformers 4 and 5). Raises ConfigError with one sentence."""
    name = raw.get("model_type")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ConfigError(f"model_type {name!r} is not supported; supported: {', '.join(SUPPORTED)}")
    if raw.get("quantization_config"):
        raise ConfigError(
            "the weights are quantised (quantization_config), which is not supported; take the float32, float16 or "
            "bfloat16 ones"
        )
    try:
        return family, _read(family, raw)
    except ConfigError:
        raise
    except KeyError as error:
        raise ConfigError(f"the key {error.args[0]!r} is missing") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigError(_in_words(error)) from None


def family_of(config: ModelConfig) -> FamilySpec:
    """The first family whose config.json says all of `config`, so that as many programs as possible can read it."""
    for family in _FAMILIES.values():
        try:
            if _read(family, family.write(config)) == config:
                return family
        except ConfigError:
            continue
    raise AssertionError("our own layout tells every shape")


def write_config(config: ModelConfig, dtype: str, eos_id: int | None) -> dict[str, Any]:
    """The config.json of `config`, in the dialect of family_of(config)."""
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


def _in_words(error: Exception) -> str:
    """Python's own message, for values of a wrong kind; "missing ... keyword-only arguments" names the keys."""
    if missing := re.search(r"missing \d+ required keyword-only arguments?: (.*)", str(error)):
        return f"keys are missing: {missing.group(1)}"
    return f"a value has the wrong kind ({error})"
