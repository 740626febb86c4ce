"""GGUF files, versions 2 and 3: their metadata, and where their tensors lie. Reads no number of a tensor.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

"GGUF", version, counts | metadata: key, type, value | tensors: name, sizes, type, offset | padding | numbers

Nothing in the header is trusted: each length is compared with what is left of the file before anything is allocated,
and arrays stay bytes until they are asked for. Needs no numpy, so that the API process may read it.
"""

from __future__ import annotations

import array
import math
import mmap
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from model.files import CheckpointError, regular_file, reject_lfs_pointer
from model.gguf.ggml_types import GGML_TYPES, GgmlType
from model.weights_version import File

_MAGIC = b"GGUF"
_OLDER_MAGICS = (b"lmgg", b"fmgg", b"tjgg", b"algg")
_VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64 << 20
"""Tokenizers with 262,144 tokens and their merges take about 16 MB."""
_MAX_KEYS = 4096
_MAX_KEY_BYTES = 65_535
_MAX_TENSORS = 65_536
_MAX_NAME_BYTES = 256
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20
_MAX_PADDING = 1 << 16
"""Bytes that may follow the last tensor."""
_IDENTITY_BYTES = 1 << 16
_REPLACED = "was replaced while it was read"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a value -> format of struct."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

Scalar = int | float | bool | str
Value = Any
"""A Scalar or a MetadataArray."""


@dataclass(frozen=True, slots=True)
class MetadataArray:
    """An array of the metadata, which is decoded when it is asked for."""

    kind: int
    count: int
    content: bytes = field(repr=False)
    """As it lies in the file."""
    start: int
    """Offset of its first item in the file."""

    @property
    def has_bytes(self) -> bool:
        """Whether its items are numbers of 8 bits."""
        return SCALARS.get(self.kind) in ("B", "b")

    def items(self) -> list[Scalar]:
        """All items. Raises ValueError, with the reason only, for a text that is not UTF-8."""
        if self.kind == _STRING:
            return list(self._texts())
        if self.kind == _BOOL:
            return [byte != 0 for byte in self.content]
        numbers: array.array[Any] = array.array(SCALARS[self.kind])
        numbers.frombytes(self.content)
        if sys.byteorder == "big":
            numbers.byteswap()
        return list(numbers)

    def _texts(self) -> list[str]:
        content, texts, at = self.content, list[str](), 0
        for _ in range(self.count):
            (size,) = _U64.unpack_from(content, at)
            at += 8 + size
            texts.append(_text(content[at - size : at]))
        return texts


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a GGUF file."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    """In row-major order: the last size is that of a row."""
    start: int
    """Offset of its first block in the file."""

    @property
    def n_bytes(self) -> int:
        """Bytes of all blocks."""
        return math.prod(self.shape) // self.type.block * self.type.n_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """The header of a GGUF file, checked."""

    path: File
    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]
    beginning: bytes = field(repr=False)
    """How the file begins, at most up to its first tensor: another file may lie there when a tensor is read."""

    @classmethod
    def read(cls, path: File) -> GgufFile:
        """Reads the header. Raises CheckpointError."""
        try:
            with regular_file(path).open("rb") as file:
                reject_lfs_pointer(path, start := file.read(64))
                _check_start(start)
                with _mapped(file.fileno()) as content:
                    return _parsed(path, content)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
        except _HeaderError as error:
            raise CheckpointError(f"{path}: {error}") from None

    def mapped(self, tensor: GgufTensor) -> mmap.mmap:
        """The content of the file, with this tensor. Raises CheckpointError, also if another file lies there now."""
        path = regular_file(self.path)
        try:
            with path.open("rb") as file:
                content = _mapped(file.fileno())
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror or error})") from None
        except _HeaderError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        if len(content) < tensor.start + tensor.n_bytes or content[: len(self.beginning)] != self.beginning:
            content.close()
            raise CheckpointError(f"{self.path}: {_REPLACED}")
        return content


class _HeaderError(ValueError):
    """Why the file is refused, without its name."""


def _mapped(descriptor: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except ValueError:  # of a file that is empty now
        raise _HeaderError(_REPLACED) from None


def _check_start(start: bytes) -> None:
    magic = start[:4]
    if magic != _MAGIC:
        older = ", but of the format before GGUF: download a newer file" if magic in _OLDER_MAGICS else ""
        raise _HeaderError(f"is not a GGUF file{older}")
    if len(start) < 24:
        raise _HeaderError("is truncated: it ends inside its header")
    (version,) = _U32.unpack_from(start, 4)
    if version not in _VERSIONS:
        if version & 0xFFFF == 0:
            raise _HeaderError("is big-endian, which is not supported: download the little-endian file")
        remedy = "download a newer file" if version < _VERSIONS[0] else "newer ones are not known"
        raise _HeaderError(f"is GGUF version {version}, which is not supported, only {_VERSIONS}: {remedy}")


def _parsed(path: File, content: mmap.mmap) -> GgufFile:
    try:
        reader = _Reader(content)
        n_tensors, n_keys = reader.number("Q"), reader.number("Q")
        if n_tensors > _MAX_TENSORS or n_keys > _MAX_KEYS:
            raise _HeaderError(
                f"has {n_tensors} tensors and {n_keys} keys; allowed are at most {_MAX_TENSORS} and {_MAX_KEYS}"
            )
        metadata = _read_metadata(reader, n_keys)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise _HeaderError(f"general.alignment {alignment!r:.40} is not a power of 2 up to {_MAX_ALIGNMENT}")
        entries = [_read_entry(reader) for _ in range(n_tensors)]
    except (struct.error, IndexError):
        if len(content) > MAX_HEADER_BYTES:
            raise _HeaderError(f"the header has more than {MAX_HEADER_BYTES} bytes") from None
        raise _HeaderError("is truncated: it ends inside its header") from None
    first = -(-reader.at // alignment) * alignment
    tensors = _placed(entries, first, alignment, len(content))
    return GgufFile(
        path=path,
        version=_U32.unpack_from(content, 4)[0],
        metadata=metadata,
        tensors=tensors,
        beginning=content[: min(reader.at, _IDENTITY_BYTES)],
    )


class _Reader:
    """Reads values one after the other. Raises struct.error or IndexError at the end of what may be the header."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.at, self.end = content, 8, min(len(content), MAX_HEADER_BYTES)

    def number(self, kind: str) -> Any:
        """A number of struct's format."""
        codec = struct.Struct(f"<{kind}")
        self._require(codec.size)
        (value,) = codec.unpack_from(self.content, self.at)
        self.at += codec.size
        return value

    def text(self, max_bytes: int) -> str:
        """A text with its length before it."""
        size = self.number("Q")
        self._require(size)
        if size > max_bytes:
            raise _HeaderError(f"a name of {size} bytes is too long: at most {max_bytes} are allowed")
        self.at += size
        return _text(self.content[self.at - size : self.at])

    def value(self, kind: int) -> Value:
        """A value of the metadata."""
        if kind == _STRING:
            return self.text(MAX_HEADER_BYTES)
        if kind == _ARRAY:
            return self._array()
        if kind not in SCALARS:
            raise _HeaderError(f"has a value of the unknown type {kind}")
        if kind == _BOOL:
            return self.number("B") != 0
        return self.number(SCALARS[kind])

    def _array(self) -> MetadataArray:
        kind, count = self.number("I"), self.number("Q")
        if kind == _ARRAY:
            raise _HeaderError("has an array of arrays, which no model needs")
        if kind not in SCALARS and kind != _STRING:
            raise _HeaderError(f"has an array of the unknown type {kind}")
        start = self.at
        if kind == _STRING:
            self._require(8 * count)
            self._skip_texts(count)
        else:
            size = count * struct.calcsize(f"<{SCALARS[kind]}")
            self._require(size)
            self.at += size
        return MetadataArray(kind, count, self.content[start : self.at], start)

    def _skip_texts(self, count: int) -> None:
        at, last, content, length = self.at, self.end - 8, self.content, _U64.unpack_from
        for _ in range(count):
            if at > last:
                raise IndexError
            at += 8 + length(content, at)[0]
        self.at = at
        self._require(0)

    def _require(self, size: int) -> None:
        if self.at + size > self.end:
            raise IndexError


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise _HeaderError(f"has a text that is not UTF-8: {content[:40]!r}") from None


def _read_metadata(reader: _Reader, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key, kind = reader.text(_MAX_KEY_BYTES), reader.number("I")
        if key in metadata:
            raise _HeaderError(f"has the metadata key {key!r:.80} twice")
        try:
            metadata[key] = reader.value(kind)
        except _HeaderError as error:
            raise _HeaderError(f"the metadata key {key!r:.80} {error}") from None
    return metadata


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    sizes: tuple[int, ...]
    kind: int
    offset: int


def _read_entry(reader: _Reader) -> _Entry:
    name, n_dims = reader.text(_MAX_NAME_BYTES), reader.number("I")
    if n_dims > _MAX_DIMS:
        raise _HeaderError(f"{name!r:.80} has {n_dims} dimensions; at most {_MAX_DIMS} are allowed")
    sizes = tuple(reader.number("Q") for _ in range(n_dims))
    return _Entry(name, sizes[::-1], reader.number("I"), reader.number("Q"))


def _placed(entries: list[_Entry], first: int, alignment: int, size: int) -> dict[str, GgufTensor]:
    """The tensors by name. first: offset of the numbers. size: of the file."""
    tensors: dict[str, GgufTensor] = {}
    for entry in entries:
        kind = GGML_TYPES.get(entry.kind)
        if entry.name in tensors:
            raise _HeaderError(f"has the tensor {entry.name!r:.80} twice")
        if kind is None:
            raise _HeaderError(f"{entry.name!r:.80} has the unknown type {entry.kind}: the file may be newer than this")
        if 0 in entry.sizes or (entry.sizes[-1] if entry.sizes else 1) % kind.block:
            raise _HeaderError(
                f"{entry.name!r:.80} has shape {list(entry.sizes)}, and the rows of {kind.name} have a multiple of "
                f"{kind.block} numbers"
            )
        if entry.offset % alignment:
            raise _HeaderError(f"{entry.name!r:.80} begins at {entry.offset}, which is no multiple of {alignment}")
        tensors[entry.name] = GgufTensor(entry.name, kind, entry.sizes, first + entry.offset)
    end = first
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        if tensor.start < end:
            raise _HeaderError(f"{tensor.name!r:.80} overlaps another tensor")
        end = tensor.start + tensor.n_bytes
        if end > size:
            raise _HeaderError(f"is truncated: it has {size} bytes, and {tensor.name!r:.80} ends at {end}")
    if tensors and size - end > max(alignment, _MAX_PADDING):
        raise _HeaderError(f"is longer than its header says: {size - end} bytes follow the last tensor")
    return tensors
