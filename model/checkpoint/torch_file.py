"""What a file of torch.save() holds: names, shapes, and where each tensor's numbers lie. Run it in a confined process.

The file is a pickle beside the numbers. Of the pickle only plain values, ordered dicts and tensors are read; anything
else it names is refused, and nothing it names is imported or called. No number is read, so the memory is the pickle's.
The layouts are those of torch/serialization.py: an archive with a record for each storage, and before torch 1.6 a
sequence of pickles with the storages behind them.
"""

from __future__ import annotations

import codecs
import os
import pickle  # nosec B403
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
from msgspec import Struct

from model.files import CheckpointError, one_line

_MAX_PICKLE_BYTES = 64 << 20
"""A tensor takes about 150 bytes there, with the states of an optimizer three times as much."""
_MAX_DIMENSIONS = 8
codecs.lookup("cp437")  # zipfile's for names of records, imported now: a confined process can open no module
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_STORAGES = {
    "DoubleStorage": ("F64", 8),
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2),
    "LongStorage": ("I64", 8),
    "IntStorage": ("I32", 4),
    "ShortStorage": ("I16", 2),
    "CharStorage": ("I8", 1),
    "ByteStorage": ("U8", 1),
    "BoolStorage": ("BOOL", 1),
}
"""torch's class -> dtype of safetensors, bytes of a number."""
Argument = int | float | bool | str | None


class TorchTensor(Struct, frozen=True, kw_only=True):
    """One tensor of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    """Offset of its first number in the file."""


class TorchFile(Struct, frozen=True, kw_only=True):
    """A state dict, or the checkpoint of a nanoGPT."""

    tensors: tuple[TorchTensor, ...]
    arguments: dict[str, Argument] | None = None
    """model_args of a nanoGPT."""


class Question(Struct, frozen=True, kw_only=True):
    """What the confined process is asked."""

    path: str
    has_characters: bool = False
    """Whether the file is the meta.pkl of a nanoGPT, not one of torch.save()."""

    def encode(self) -> bytes:
        """For answer_question()."""
        return msgspec.json.encode(self)


class Answer(Struct, frozen=True, kw_only=True):
    """One of the three."""

    problem: str = ""
    file: TorchFile | None = None
    characters: dict[str, int] | None = None


class TorchFileError(ValueError):
    """A file that is not read; the message is the reason only."""


class _StorageType(NamedTuple):
    dtype: str
    n_bytes: int


class _Storage(NamedTuple):
    key: str
    type: _StorageType
    first: int
    """Of a view of another storage: number of its first element there."""


class _Tensor(NamedTuple):
    storage: _Storage
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Rebuild:
    """Stands for torch's functions that make a tensor of a storage."""

    __slots__ = ()

    def __call__(self, storage: Any, first: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
        sizes = (*shape, *strides, first)
        if not isinstance(storage, _Storage) or not all(type(size) is int and 0 <= size < 1 << 48 for size in sizes):
            raise TorchFileError("has a tensor with an invalid size")
        if len(shape) != len(strides) or len(shape) > _MAX_DIMENSIONS:
            raise TorchFileError(f"has a tensor of {len(shape)} dimensions; at most {_MAX_DIMENSIONS} are allowed")
        return _Tensor(storage, first, tuple(shape), tuple(strides))


class _Parameter:
    """Stands for torch's functions that make a parameter of a tensor."""

    __slots__ = ()

    def __call__(self, tensor: Any, *_: Any) -> Any:
        return tensor


_KNOWN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor"): _Rebuild(),
    ("torch._utils", "_rebuild_tensor_v2"): _Rebuild(),
    ("torch._utils", "_rebuild_parameter"): _Parameter(),
    ("torch._utils", "_rebuild_parameter_with_state"): _Parameter(),
    **{("torch", name): _StorageType(*of) for name, of in _STORAGES.items()},
}
"""All that a pickle may name. Only the first is a type; the others are objects without attributes that could be set."""


class _Unpickler(pickle.Unpickler):
    """Makes plain values, and tensors without numbers."""

    def __init__(self, file: IO[bytes], known: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(file, encoding="utf-8")
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a global of the pickle. Raises TorchFileError."""
        if (found := self._known.get((module, name))) is None:
            raise TorchFileError(
                f"names {module}.{name}, which could run code: only tensors and plain values are read; save the state "
                "dict alone: torch.save(model.state_dict(), ...)"
            )
        return found

    def persistent_load(self, pid: Any) -> _Storage:
        """The storage that a tensor names. Raises TorchFileError."""
        if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
            raise TorchFileError("is not a file of torch.save()")
        _, kind, key, _, _, *views = pid
        first = 0
        if views and views[0] is not None:
            _, first, _ = views[0]
        if not isinstance(kind, _StorageType) or not isinstance(key, str):
            raise TorchFileError("has a storage of a type that is not read")
        if type(first) is not int or first < 0:
            raise TorchFileError("has a storage with an invalid size")
        return _Storage(key, kind, first)


def answer_question(encoded: bytes, confine: Callable[[], None]) -> bytes:
    """The encoded Answer to an encoded Question; never raises. confine: called once the file is open."""
    question = msgspec.json.decode(encoded, type=Question)
    try:
        with open(question.path, "rb") as opened:  # noqa: PTH123 (confine() leaves nothing to import)
            confine()
            if question.has_characters:
                return msgspec.json.encode(Answer(characters=_read_characters(opened)))
            return msgspec.json.encode(Answer(file=_read_torch_file(opened)))
    except TorchFileError as error:
        problem = str(error)
    except (MemoryError, RecursionError):
        problem = "takes too much memory to read"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except Exception as error:  # a damaged pickle raises anything
        problem = f"is damaged, or not a file of torch.save() ({type(error).__name__})"
    return msgspec.json.encode(Answer(problem=one_line(problem)))


def _answer(path: Path, encoded: bytes) -> Answer:
    try:
        found = msgspec.json.decode(encoded, type=Answer)
    except ValueError:
        raise CheckpointError(f"{path}: cannot be read: the confined process returned something else") from None
    if found.problem:
        raise CheckpointError(f"{path}: {found.problem}")
    return found


def decode_file(path: Path, encoded: bytes) -> TorchFile:
    """What a confined process found in a file. Raises CheckpointError."""
    if (file := _answer(path, encoded).file) is None:
        raise CheckpointError(f"{path}: cannot be read: the confined process returned something else")
    return file


def decode_characters(path: Path, encoded: bytes) -> dict[str, int]:
    """The ids of characters that a confined process found in a file. Raises CheckpointError."""
    if (characters := _answer(path, encoded).characters) is None:
        raise CheckpointError(f"{path}: cannot be read: the confined process returned something else")
    return characters


def _read_characters(opened: IO[bytes]) -> dict[str, int]:
    """`stoi` of a meta.pkl: the id of each character."""
    meta = _Unpickler(opened, {}).load()
    ids = meta.get("stoi") if type(meta) is dict else None
    if type(ids) is not dict or not ids:
        raise TorchFileError("has no stoi, the dict from characters to ids of a nanoGPT's data set")
    if not all(type(key) is str and len(key) == 1 and type(number) is int for key, number in ids.items()):
        raise TorchFileError("has a stoi of something other than single characters and their ids")
    return ids


def _read_torch_file(opened: IO[bytes]) -> TorchFile:
    opened.seek(0, os.SEEK_END)
    size = opened.tell()
    opened.seek(0)
    start = opened.read(4)
    opened.seek(0)
    content, starts = _read_archive(opened) if start == b"PK\x03\x04" else _read_legacy(opened, size)
    state, arguments = content, None
    if isinstance(content, dict) and "model" in content and not isinstance(content["model"], _Tensor):
        state, arguments = content["model"], content.get("model_args")
        if arguments is None:
            raise TorchFileError(
                "has a model and no model_args, so it is not of a nanoGPT; save the state dict alone: "
                "torch.save(model.state_dict(), ...)"
            )
        if not _are_arguments(arguments):
            raise TorchFileError("has model_args that are no plain numbers and texts")
    if not isinstance(state, dict) or not state:
        raise TorchFileError("holds no state dict, which has tensors by their names")
    tensors = [_located(name, tensor, starts, size) for name, tensor in state.items()]
    return TorchFile(tensors=tuple(tensors), arguments=arguments)


def _are_arguments(arguments: Any) -> bool:
    kinds = (int, float, bool, str, type(None))
    return type(arguments) is dict and all(
        type(name) is str and type(value) in kinds for name, value in arguments.items()
    )


def _located(name: Any, tensor: Any, starts: Mapping[str, tuple[int, int]], size: int) -> TorchTensor:
    """starts: by the key of a storage: offset of its first number in the file, and its bytes."""
    if type(name) is not str or not isinstance(tensor, _Tensor):
        raise TorchFileError(f"holds {name!r:.60}, a {type(tensor).__name__}: a state dict has tensors alone")
    storage = tensor.storage
    if storage.key not in starts:
        raise TorchFileError(f"has no numbers of {name}: it is damaged or truncated")
    start, n_bytes = starts[storage.key]
    first, item = storage.first + tensor.first, storage.type.n_bytes
    extent, count = _extent(tensor.shape, tensor.strides)
    if start + n_bytes > size or (first + extent) * item > n_bytes:
        raise TorchFileError(f"has fewer numbers than {name} needs: it is damaged or truncated")
    if count > extent:
        raise TorchFileError(f"has {name}, whose numbers are repeated (expand()); save a clone() of it")
    return TorchTensor(
        name=name, dtype=storage.type.dtype, shape=tensor.shape, strides=tensor.strides, start=start + first * item
    )


def _extent(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """Numbers from the first to the last one, and how many of them there are."""
    count = 1
    for size in shape:
        count *= size
    return (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if count else 0), count


def _read_archive(opened: IO[bytes]) -> tuple[Any, dict[str, tuple[int, int]]]:
    try:
        archive = zipfile.ZipFile(opened)
    except zipfile.BadZipFile:
        raise TorchFileError("is a damaged or truncated archive") from None
    records = {each.filename.partition("/")[2]: each for each in archive.infolist()}
    if "constants.pkl" in records:
        raise TorchFileError("is a TorchScript program; save the state dict alone: torch.save(model.state_dict(), ...)")
    if "data.pkl" not in records:
        raise TorchFileError("is an archive, but not one of torch.save()")
    if any(each.compress_type != zipfile.ZIP_STORED for each in records.values()):
        raise TorchFileError("is a compressed archive, which torch.save() does not write")
    if records["data.pkl"].file_size > _MAX_PICKLE_BYTES:
        raise TorchFileError(f"has a pickle of more than {_MAX_PICKLE_BYTES} bytes")
    if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
        raise TorchFileError("was saved on a machine with another byte order; save it again on this one")
    with archive.open(records["data.pkl"]) as file:
        content = _Unpickler(file, _KNOWN).load()
    starts = {}
    for name, record in records.items():
        if name.startswith("data/"):
            opened.seek(record.header_offset)
            header = opened.read(30)
            if header[:4] != b"PK\x03\x04":
                raise TorchFileError("is a damaged archive")
            lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            starts[name.removeprefix("data/")] = (record.header_offset + 30 + lengths, record.file_size)
    return content, starts


def _read_legacy(opened: IO[bytes], size: int) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Magic number, version, system, content, keys; then each storage, with the number of its elements before it."""
    if _Unpickler(opened, {}).load() != _LEGACY_MAGIC:
        raise TorchFileError("is no file of torch.save()")
    _Unpickler(opened, {}).load()
    system = _Unpickler(opened, {}).load()
    if isinstance(system, dict) and not system.get("little_endian", True):
        raise TorchFileError("was saved on a machine with another byte order; save it again on this one")
    reader = _LegacyUnpickler(opened, _KNOWN)
    content = reader.load()
    keys = _Unpickler(opened, {}).load()
    starts, at = {}, opened.tell()
    for key in keys if isinstance(keys, list) else ():
        opened.seek(at)
        count, item = int.from_bytes(opened.read(8), "little"), reader.item_bytes.get(key, 0)
        if at + 8 + count * item > size:
            raise TorchFileError("is truncated")
        starts[key] = at + 8, count * item
        at += 8 + count * item
    return content, starts


class _LegacyUnpickler(_Unpickler):
    """Remembers the size of the numbers of each storage."""

    def __init__(self, file: IO[bytes], known: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(file, known)
        self.item_bytes: dict[str, int] = {}

    def persistent_load(self, pid: Any) -> _Storage:
        """See _Unpickler."""
        storage = super().persistent_load(pid)
        self.item_bytes[storage.key] = storage.type.n_bytes
        return storage
