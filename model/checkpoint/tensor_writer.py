"""Writes a safetensors file piece by piece, so that no tensor must be in memory whole."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from model.files import MAX_JSON_BYTES, CheckpointError
from model.number_formats import Array

_ITEM_BYTES = {"I64": 8, "I32": 4, "F32": 4, "F16": 2, "BF16": 2}
"""Of an element, by the dtypes of safetensors that this module writes."""


@dataclass(frozen=True, slots=True)
class NewTensor:
    """Name, dtype and shape of a tensor to write."""

    name: str
    dtype: str
    """I64, I32, F32, F16 or BF16."""
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class TensorWriter:
    """A safetensors file whose header is written first; pieces of its tensors may then arrive in any order.

    Tensors with larger elements come first, which aligns each one to its elements, as readers that map files expect.
    """

    def __init__(self, file: BinaryIO, tensors: Sequence[NewTensor]) -> None:
        """Writes the header. Raises OSError, and CheckpointError if the header would be too long to be read again."""
        self._file = file
        header, self._next, self._end = _layout(tensors)
        if len(header) - 8 > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{len(tensors)} tensors need a header of {len(header) - 8} bytes, more than the {MAX_JSON_BYTES} that "
                "a safetensors file may have here; convert with fewer tensors (without --quantize)"
            )
        file.write(header)
        file.truncate(max([len(header), *self._end.values()]))

    def append(self, name: str, piece: Array) -> int:
        """Writes the next elements of a tensor, in the order of its elements; returns their bytes. Raises OSError."""
        elements = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
        assert self._next[name] + elements.nbytes <= self._end[name], f"{name} gets more than its shape has"
        self._file.seek(self._next[name])
        self._file.write(elements.data)
        self._next[name] += elements.nbytes
        return elements.nbytes

    def check_complete(self) -> None:
        """Asserts that each tensor got all of its elements."""
        assert self._next == self._end, "a tensor got fewer elements than its shape has"


def file_bytes(tensors: Sequence[NewTensor]) -> int:
    """Bytes of the file."""
    header, _, end = _layout(tensors)
    return max([len(header), *end.values()])


def _layout(tensors: Sequence[NewTensor]) -> tuple[bytes, dict[str, int], dict[str, int]]:
    """The header, and where each tensor begins and ends in the file."""
    entries, starts, ends, end = dict[str, object](), dict[str, int](), dict[str, int](), 0
    for tensor in sorted(tensors, key=lambda each: -_ITEM_BYTES[each.dtype]):
        starts[tensor.name], ends[tensor.name] = end, end + tensor.n_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end := end + tensor.n_bytes],
        }
    assert len(entries) == len(tensors), "two tensors have one name"
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    next_bytes, last_bytes = ({name: len(header) + at for name, at in each.items()} for each in (starts, ends))
    return header, next_bytes, last_bytes
