"""Metadata keys of a model's architecture, and which of them were read: what nothing reads is refused."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from model.config import MAX_ROPE_FACTORS, ConfigError
from model.gguf.ggml_types import GGML_TYPES
from model.gguf.gguf_file import SCALARS, GgufFile, GgufTensor, MetadataArray, Value

_HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.yarn_ext_factor")
"""Keys that change nothing here: the rows of the embedding count, and the others are of other programs."""
_MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataReader:
    """Reads keys of the architecture by their names without it: attention.head_count, ..."""

    architecture: str
    files: tuple[GgufFile, ...]
    """One, or the parts of a series; the first one has the metadata."""
    tensors: Mapping[str, GgufTensor]
    _read: set[str] = field(default_factory=set)

    @property
    def metadata(self) -> Mapping[str, Value]:
        """All keys."""
        return self.files[0].metadata

    def get(self, name: str, default: Any = None) -> Any:
        """A value that all layers share. Raises ConfigError for an array of different ones."""
        value = self._value(name)
        if isinstance(value, MetadataArray):
            items = set(self._items(name, value))
            if not items:
                raise ConfigError(f"{self._key(name)} is an empty array")
            if len(items) > 1:
                raise ConfigError(f"{self._key(name)} differs between layers, which is not supported")
            value = items.pop()
        return default if value is None else shortest(value)

    def require(self, *names: str) -> Any:
        """The first of these keys that is present. Raises ConfigError without one."""
        for name in names:
            if (value := self.get(name)) is not None:
                return value
        raise ConfigError(f"the metadata key {self._key(names[0])} is missing")

    def items(self, name: str) -> list[Any] | None:
        """The items of an array, if the key is one."""
        value = self._value(name)
        return self._items(name, value) if isinstance(value, MetadataArray) else None

    def _items(self, name: str, array: MetadataArray) -> list[Any]:
        if array.count > _MAX_LAYERS:
            raise ConfigError(f"{self._key(name)} has {array.count} values; at most {_MAX_LAYERS} are supported")
        return array.items()

    def layers(self) -> int:
        """The number of layers. Raises ConfigError."""
        count = self.require("block_count")
        if type(count) is not int or not 1 <= count <= _MAX_LAYERS:
            raise ConfigError(
                f"{self._key('block_count')} cannot be {count!r:.40}: at most {_MAX_LAYERS} are supported"
            )
        return count

    def has(self, tensor: str) -> bool:
        """Whether there is a tensor of this name."""
        return tensor in self.tensors

    def rows(self, tensor: str) -> int:
        """The rows of a matrix. Raises ConfigError if there is none."""
        found = self.tensors.get(tensor)
        if found is None or len(found.shape) != 2:
            raise ConfigError(f"the tensor {tensor} is missing or no matrix")
        return found.shape[0]

    def floats(self, tensor: str) -> list[float] | None:
        """The numbers of a short vector, if there is one of this name. Raises ConfigError, CheckpointError."""
        found = self.tensors.get(tensor)
        if found is None:
            return None
        self._read.add(tensor)
        if found.type.name != "F32" or len(found.shape) != 1 or found.shape[0] > MAX_ROPE_FACTORS:
            raise ConfigError(f"{tensor} must be a vector of F32 with at most {MAX_ROPE_FACTORS} numbers")
        owner = next(file for file in self.files if file.tensors.get(tensor) is found)
        with owner.mapped(found) as content:
            numbers = struct.unpack_from(f"<{found.shape[0]}f", content, found.start)
        return [shortest(number) for number in numbers]

    def layer_tensors(self, key: str) -> Iterator[GgufTensor]:
        """The numbers of an array with one for each layer, as the tensors blk.N.KEY, which lie where the array does.

        key: without an architecture before it. Raises ConfigError.
        """
        values, count = self.metadata.get(key), self.layers()
        if not isinstance(values, MetadataArray) or SCALARS.get(values.kind) != "f" or values.count != count:
            raise ConfigError(
                f"the metadata key {key} must be an array of F32 with one number for each of {count} layers"
            )
        number = GGML_TYPES[0]
        for layer in range(count):
            yield GgufTensor(f"blk.{layer}.{key}", number, (1,), values.start + layer * number.n_bytes)

    def check_all_read(self) -> None:
        """Raises ConfigError if a key or a tensor of a rotation would change the model and was not read."""
        for key, value in self.metadata.items():
            name = key.removeprefix(f"{self.architecture}.")
            if name == key or name in self._read or name in _HARMLESS:
                continue
            if isinstance(value, MetadataArray) or value not in (0, "", "none"):
                raise ConfigError(f"the metadata key {key!r:.80} is not supported")
        for tensor in ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"):
            if self.has(tensor) and tensor not in self._read:
                raise ConfigError(f"{tensor} is not supported in models of {self.architecture}")

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def _value(self, name: str) -> Value:
        self._read.add(name)
        return self.metadata.get(self._key(name))


def shortest(value: Any) -> Any:
    """A number of float32 as the shortest decimal number that rounds to it, as people wrote it; others as they are."""
    if not isinstance(value, float) or _as_float32(value) != value:
        return value
    numbers = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((number for number in numbers if _as_float32(number) == value), value)


def _as_float32(value: float) -> float:
    """Rounded to float32; numbers beyond it become infinite."""
    return ctypes.c_float(value).value
