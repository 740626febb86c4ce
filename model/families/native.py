"""Our own layout, for decoders that no Hugging Face family describes: ModelConfig's fields and our tensor names."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import torch

from model.config import ConfigError, ModelConfig, RopeScaling
from model.families.spec import FamilySpec, Raw, TensorMapping, single
from model.nn.transformer import Decoder

_FIELDS = {field.name for field in fields(ModelConfig)}
_ABOUT_FILES = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version"}
_TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id"}


def _pieces(config: ModelConfig) -> list[TensorMapping]:
    with torch.device("meta"):
        state = Decoder(config).state_dict()
    return [single(name, name, *tensor.shape) for name, tensor in state.items()]


def _read(raw: Raw) -> ModelConfig:
    if unknown := sorted(raw.keys() - _FIELDS - _ABOUT_FILES - _TOKENS):
        raise ConfigError(f"the key {unknown[0]!r} is unknown; known are {', '.join(sorted(_FIELDS))}")
    values = {name: value for name, value in raw.items() if name in _FIELDS}
    if scaling := values.get("rope_scaling"):
        values["rope_scaling"] = RopeScaling(**scaling)
    return ModelConfig(**values)


def _write(config: ModelConfig) -> dict[str, Any]:
    return asdict(config)


OWN = FamilySpec(name="inkstream", architecture="InkstreamDecoder", read=_read, write=_write, pieces=_pieces)
