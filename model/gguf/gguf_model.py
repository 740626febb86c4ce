"""A model of one GGUF file, or of a series of them: its config.json, generation settings, and tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model.config import ConfigError
from model.families.registry import read_config
from model.families.spec import FamilySpec
from model.files import CheckpointError
from model.gguf.architectures import ARCHITECTURES, Architecture
from model.gguf.gguf_file import GgufFile, GgufTensor
from model.gguf.metadata_reader import MetadataReader, shortest
from model.weights_version import File

_MAX_PARTS = 4096
_ROLES = {"bos": "bos_token_id", "padding": "pad_token_id"}
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_SAMPLING |= {"penalty_repeat": "repetition_penalty"}
_DENSE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NO_TOKENS = (-1, (1 << 32) - 1)
"""What some converters write for a token that does not exist."""
_PROJECTOR = "clip"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """The headers of the files of a model, and what they say."""

    files: tuple[GgufFile, ...]
    tensors: Mapping[str, tuple[GgufFile, GgufTensor]]
    """By name, with those of Architecture.layer_arrays."""
    architecture: Architecture
    config: Mapping[str, Any]
    """Its config.json."""
    generation: Mapping[str, Any]
    """Its generation_config.json, without the tokens that end a text."""

    @classmethod
    def read(cls, paths: Sequence[File]) -> GgufModel:
        """paths: of the file, or of the whole series in its order. Raises CheckpointError."""
        files = tuple(map(GgufFile.read, paths))
        _check_series(files)
        tensors = _all_tensors(files)
        try:
            name = _architecture(files[0])
            reader = MetadataReader(
                architecture=name, files=files, tensors={name: tensor for name, (_, tensor) in tensors.items()}
            )
            architecture = ARCHITECTURES[name]
            config = {
                "model_type": architecture.family,
                "dtype": _number_format(tensors),
                **architecture.read(reader),
            }
            reader.check_all_read()
            for key in architecture.layer_arrays:
                tensors |= {tensor.name: (files[0], tensor) for tensor in reader.layer_tensors(key)}
            config = {"architectures": [read_config(config)[0].architecture], **config}
            generation = _generation(files[0].metadata)
        except ConfigError as error:
            raise CheckpointError(f"{paths[0]}: {error}") from None
        except (TypeError, ArithmeticError) as error:
            raise CheckpointError(f"{paths[0]}: a value of the metadata has the wrong type ({error})") from None
        except ValueError as error:
            message = str(error) if isinstance(error, CheckpointError) else f"{paths[0]}: {error}"
            raise CheckpointError(message) from None
        return cls(files=files, tensors=tensors, architecture=architecture, config=config, generation=generation)

    def family_of_files(self, family: FamilySpec) -> FamilySpec:
        """The family with the names and the layout of these files."""
        return self.architecture.family_of_files(family, self.tensors.keys())


def _check_series(files: Sequence[GgufFile]) -> None:
    """Raises CheckpointError unless the files are one model."""
    for number, file in enumerate(files):
        at, count = file.metadata.get("split.no", 0), file.metadata.get("split.count", 0)
        count = count or 1
        if (at, count) != (number, len(files)):
            raise CheckpointError(
                f"{file.path}: is part {_plain(at)} of {_plain(count)}, counted from 0; its name says part {number} of "
                f"{len(files)}: use the names {_series_name(count)}"
            )
    total = files[0].metadata.get("split.tensors.count")
    found = sum(len(file.tensors) for file in files)
    if len(files) > 1 and total is not None and total != found:
        raise CheckpointError(
            f"{files[0].path}: the series has {found} tensors, and its first file says {_plain(total)}"
        )


def _plain(value: Any) -> str:
    return f"{value!r:.40}"


def _series_name(count: Any) -> str:
    number = f"{count:05}" if isinstance(count, int) and 0 < count <= _MAX_PARTS else "0000N"
    return f"NAME-00001-of-{number}.gguf and so on, in one folder"


def _all_tensors(files: Sequence[GgufFile]) -> dict[str, tuple[GgufFile, GgufTensor]]:
    tensors: dict[str, tuple[GgufFile, GgufTensor]] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{file.path}: holds {name!r:.80}, which another file of the series holds, too")
            tensors[name] = file, tensor
    return tensors


def _architecture(file: GgufFile) -> str:
    """Raises ConfigError if the file holds no model, or an unsupported one."""
    name, kind = file.metadata.get("general.architecture"), file.metadata.get("general.type", "model")
    if name == _PROJECTOR or kind == "mmproj":
        raise ConfigError("is the vision part (mmproj) of a model: give the file of the model itself")
    if kind != "model":
        raise ConfigError(f"is of the general.type {_plain(kind)}, not a model")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            f"general.architecture {_plain(name)} is not supported in GGUF files; supported: {', '.join(ARCHITECTURES)}"
        )
    return name


def _number_format(tensors: Mapping[str, tuple[GgufFile, GgufTensor]]) -> str:
    """Of dense weights that are made from the file: that of its matrices, or bfloat16 if some are quantized."""
    types = {tensor.type.name for _, tensor in tensors.values() if len(tensor.shape) > 1}
    return _DENSE.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16"


def _generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    roles = {key: _token_id(metadata, role) for role, key in _ROLES.items()}
    sampling = {key: _sampling(metadata, name) for name, key in _SAMPLING.items()}
    found = {name: value for name, value in {**roles, **sampling}.items() if value is not None}
    return found | ({"do_sample": True} if any(sampling.values()) else {})


def _token_id(metadata: Mapping[str, Any], role: str) -> int | None:
    """The id of a special token, if the file names one. Raises ConfigError."""
    key = f"tokenizer.ggml.{role}_token_id"
    value = metadata.get(key)
    if value is not None and type(value) is not int:
        raise ConfigError(f"{key} must be a number")
    return None if value in _NO_TOKENS else value


def _sampling(metadata: Mapping[str, Any], name: str) -> float | None:
    """A sampling parameter that the file names. Raises ConfigError unless it is a finite number."""
    key = f"general.sampling.{name}"
    if (value := metadata.get(key)) is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ConfigError(f"{key} cannot be {_plain(value)}, only a finite number")
    number: float = shortest(value)
    return number
