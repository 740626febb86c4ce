"""config.json of a weights directory. Needs no numpy, so that the API process may read it."""

from __future__ import annotations

from typing import Any

from model.checkpoint.tensor_index import check_layout
from model.config import ConfigError, ModelConfig
from model.families.registry import read_config, text_keys
from model.families.spec import FamilySpec
from model.files import CheckpointError, read_json
from model.weights_version import Directory


def load_config(directory: Directory) -> ModelConfig:
    """The architecture. Raises CheckpointError."""
    return read_config_file(directory)[2]


def read_config_file(directory: Directory) -> tuple[dict[str, Any], FamilySpec, ModelConfig]:
    """What the file says of the text decoder, the model family, and the architecture. Raises CheckpointError."""
    check_layout(directory, with_tokenizer=False)
    path = directory / "config.json"
    raw = read_json(path)
    try:
        return dict(text_keys(raw)), *read_config(raw)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
