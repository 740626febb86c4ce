"""Weights directory: which files it must have, and which safetensors file holds which tensor.

Explains what is missing, and checks each safetensors header before anything is mapped into memory.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from reprlib import repr as short
from typing import Any

from model.files import (
    MOST_JSON_BYTES,
    CheckpointError,
    is_there,
    names_in,
    parse_object,
    read_bytes,
    read_json,
    refuse_pointer,
    regular_file,
    sha256,
)
from model.tokenizer.tokenizer import read_names

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_BRING = "docs/bring-your-model.md tells how to make it"


def check_layout(directory: Path, *, with_tokenizer: bool = True) -> None:
    """Raises CheckpointError for what can be seen at once."""
    if (names := names_in(directory)) is None:
        names = _listed(directory)
    for needed in (("config.json",), (WEIGHTS_FILE, INDEX_FILE), *[("tokenizer.json",)] * with_tokenizer):
        if not any(is_there(directory / name) for name in needed):
            raise CheckpointError(f"{directory / needed[0]}: no such file{_instead(needed[0], names)}")


def _listed(directory: Path) -> set[str]:
    """The names in the directory. Raises CheckpointError."""
    if not os.path.isdir(directory):  # noqa: PTH112 (pathlib raises for names too long and folders not to be entered)
        kind = "is not a directory" if os.path.exists(directory) else "no such directory"  # noqa: PTH110
        raise CheckpointError(f"{directory}: {kind}; train a model with inkstream train, or bring one")
    try:
        return set(os.listdir(directory))  # noqa: PTH208
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read ({error.strerror})") from None


def _instead(needed: str, names: set[str]) -> str:
    """What is there in its place, and what to make of it."""
    if "adapter_config.json" in names and needed != "tokenizer.json":
        return "; this is an adapter: merge it into its model and save that"
    if needed == "config.json":
        return (
            "; of a download of the Hugging Face hub, give the folder below snapshots" if "snapshots" in names else ""
        )
    if needed == "tokenizer.json":
        older = sorted(names & {"tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"})
        how = "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers makes it of"
        return f"; {how} {older[0]}" if older else ""
    if any(name.startswith("model-") and name.endswith(".safetensors") for name in names):
        return f", and {INDEX_FILE} is missing from the shards"
    pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
    return f"; {pickles[0]} is not read, because a pickle can run code: {_BRING}" if pickles else ""


# Files of transformers 5 and 4: chat_template.jinja, else chat_template.json, else a field of tokenizer_config.json.

_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplateFile:
    """A program in the language of Jinja that makes one text of the messages of a chat."""

    source: str
    names: dict[str, str]
    """What it may call the special tokens: "bos_token" and its like."""


def read_chat_template(directory: Path) -> ChatTemplateFile | None:
    """None where the weights bring none. Raises CheckpointError for one that cannot be read."""
    path = directory / "chat_template.jinja"
    if is_there(path):
        try:
            source: str | None = read_bytes(path, _MOST_BYTES).decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{path}: is not UTF-8") from None
    else:
        older = (directory / name for name in ("chat_template.json", "tokenizer_config.json"))
        source = next((found for path in older if (found := _field(path)) is not None), None)
    return None if source is None else ChatTemplateFile(source=source, names=read_names(directory))


def _field(path: Path) -> str | None:
    value = read_json(path, optional=True).get("chat_template")
    if isinstance(value, list):
        value = next((entry.get("template") for entry in value if _is_default(entry)), None)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise CheckpointError(f"{path}: chat_template holds half a character (a lone surrogate)") from None
        return value
    raise CheckpointError(f"{path}: chat_template is neither a text nor a list of named ones")


def _is_default(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("name") == "default"


# A file is the header's length (8 bytes, little endian), the header (JSON: name -> dtype, shape, data_offsets), and the
# tensors behind one another without a gap: https://github.com/huggingface/safetensors

_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_MOST_DIMENSIONS = 8
_MOST_SIZE = 2**48


@dataclass(frozen=True, slots=True)
class Entry:
    """What the header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, Entry]:
    """Name -> entry, of a file that is as long as its header says. Raises CheckpointError."""
    try:
        with regular_file(path).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            refuse_pointer(path, file.read(64))
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                raise CheckpointError(f"{path}: {size} bytes are too short for a safetensors file")
            if length > size - 8:
                raise CheckpointError(f"{path}: the header of {length} bytes is longer than the file of {size}")
            if length > MOST_JSON_BYTES:
                raise CheckpointError(f"{path}: the header has {length} bytes, more than {MOST_JSON_BYTES}")
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        return _entries(parse_object(header), size - 8 - length)
    except ValueError as error:
        raise CheckpointError(f"{path}: the header is wrong: {error}") from None


def _entries(raw: dict[str, Any], n_bytes: int) -> dict[str, Entry]:
    """Raises ValueError, with the reason alone."""
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ must be an object of strings")
    spans = {name: _span(name, value) for name, value in raw.items()}
    end = 0
    for name, (start, stop) in sorted(spans.items(), key=lambda item: item[1]):
        if start != end:
            raise ValueError(f"{name} begins at byte {start}, where the tensor before it ends at {end}")
        end = stop
    if end > n_bytes:
        raise ValueError(f"the tensors need {end} bytes and {n_bytes} are there: the file is cut short")
    if end != n_bytes:
        raise ValueError(f"the tensors end at byte {end} of {n_bytes}")
    return {name: Entry(value["dtype"], tuple(value["shape"])) for name, value in raw.items()}


def _span(name: str, value: Any) -> tuple[int, int]:
    """First byte of the tensor and the one behind it; there are as many as its shape takes."""
    if not isinstance(value, Mapping) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BYTES:
        raise ValueError(f"{name} has the unknown dtype {short(dtype)}")
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{name} has the shape {short(shape)}, not up to {_MOST_DIMENSIONS} sizes of at least 0")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} has the data_offsets {short(offsets)}, not two bytes of the file")
    if offsets[1] - offsets[0] != (needed := prod(shape) * _BYTES[dtype]):
        raise ValueError(f"{name} takes {needed} bytes by its shape, {offsets[1] - offsets[0]} by its data_offsets")
    return offsets[0], offsets[1]


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= _MOST_SIZE for size in value)


_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on disk."""

    path: Path
    entry: Entry


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """All tensors of a weights directory."""

    source: Path
    """The one file, or the index."""
    tensors: Mapping[str, StoredTensor]

    @property
    def paths(self) -> list[Path]:
        """The files, in the order of their names."""
        return sorted({stored.path for stored in self.tensors.values()})

    def hashes(self) -> dict[Path, str]:
        """The SHA-256 of each file, in the order of their names. Raises CheckpointError."""
        return {path: sha256(path) for path in self.paths}


def version_of(hashes: Mapping[Path, str]) -> str:
    """SHA-256 of the one file, or of its shards' hexadecimal SHA-256s in their order."""
    parts = list(hashes.values())
    return parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()


def find_tensors(directory: Path) -> TensorIndex:
    """Checks that each file holds what the index says and nothing else. Raises CheckpointError."""
    whole, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
    if is_there(whole) or not is_there(index):
        return TensorIndex(whole, {name: StoredTensor(whole, entry) for name, entry in read_header(whole).items()})
    shard_of = _shards(index)
    found: dict[str, StoredTensor] = {}
    for path in sorted({directory / shard for shard in shard_of.values()}):
        for name, entry in read_header(path).items():
            if (said := shard_of.get(name)) != path.name:
                where = f"puts into {said}" if said else "does not name"
                raise CheckpointError(f"{path}: holds {name}, which {index.name} {where}")
            found[name] = StoredTensor(path, entry)
    if missing := sorted(shard_of.keys() - found.keys()):
        raise CheckpointError(
            f"{directory / shard_of[missing[0]]}: {missing[0]} is missing, {index.name} puts it there"
        )
    return TensorIndex(index, found)


def _shards(index: Path) -> dict[str, str]:
    """Name of a tensor -> name of its file."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: weight_map must be an object of file names")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise CheckpointError(f"{index}: {name} is put into {shard!r}, which is no name of a safetensors file here")
    return weight_map
