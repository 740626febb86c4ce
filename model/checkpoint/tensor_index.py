"""Weights directory: its required files, and which safetensors file holds which tensor.

Explains what is missing, and reads each safetensors header before any tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct
from safetensors import SafetensorError, safe_open

from model.files import (
    MAX_JSON_BYTES,
    CheckpointError,
    entry_exists,
    read_struct,
    regular_file,
    reject_lfs_pointer,
    unfinished_run,
)
from model.weights_version import Directory, File, WeightsVersion, path_of

if TYPE_CHECKING:  # it needs numpy, which the API process does without
    from model.packed_matrix import PackedFormat, PackedMatrix

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_GUIDE = "see docs/bring-your-model.md"
_MERGE = (
    "merge it into its base model with peft (merge_and_unload(), then save_pretrained() of the model and of the "
    "tokenizer), and use the result"
)
_WHERE_FROM = "train a model with inkstream train, bring one, or name one of the Hugging Face Hub: org/name"


def check_layout(directory: Directory, *, with_tokenizer: bool = True) -> None:
    """Checks that the required files exist. Raises CheckpointError."""
    names = set(directory.files) if isinstance(directory, WeightsVersion) else _list_names(directory)
    names |= {WEIGHTS_FILE} if gguf_files(directory) else set()
    if problem := adapter_problem(names):
        raise CheckpointError(f"{directory / 'adapter_config.json'}: {problem}")
    if needed := missing_file(names, with_tokenizer=with_tokenizer):
        if command := unfinished_run(path_of(directory)):
            raise CheckpointError(f"{directory}: unfinished training run without a model yet; continue: {command}")
        hint = remedy(needed, names) or f"; a model directory has config.json, {WEIGHTS_FILE} and tokenizer.json"
        raise CheckpointError(f"{directory}/{needed}: no such file{hint}")


def missing_file(names: set[str], *, with_tokenizer: bool = True) -> str:
    """The first required file that is not among the names of a directory or repository; empty if all are there."""
    for needed in (("config.json",), (WEIGHTS_FILE, INDEX_FILE), *[("tokenizer.json",)] * with_tokenizer):
        if names.isdisjoint(needed):
            return needed[0]
    return ""


def adapter_problem(names: set[str]) -> str:
    """Why a base model with an adapter beside it is refused, and what to do; empty without either of them."""
    if "adapter_config.json" not in names or missing_file(names, with_tokenizer=False):
        return ""
    return (
        f"the adapter would not be applied to the base model beside it; {_MERGE}, "
        "or remove the adapter's files (adapter_*) to serve the base model"
    )


def _list_names(directory: Path) -> set[str]:
    """File names in the directory. Raises CheckpointError."""
    try:
        return set(os.listdir(directory))  # noqa: PTH208
    except FileNotFoundError:
        raise CheckpointError(f"{directory}: no such directory; {_WHERE_FROM}") from None
    except NotADirectoryError:
        raise CheckpointError(f"{directory}: is not a directory; {_instead_of_file(directory)}") from None
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read ({error.strerror})") from None


def _instead_of_file(path: Path) -> str:
    """What to give instead of a file."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.read(4) == b"GGUF":
            return f"the name of a GGUF file must end with .gguf: make such a name with ln {path} NAME.gguf"
    return f"give the directory that contains it: {path.parent}"


_CONVERSIONS = {
    (".gguf",): "use the model that the GGUF file was made from, which has safetensors, or give the path of the GGUF "
    "file itself",
    (".bin", ".pt", ".pth", ".ckpt"): "a pickle can run code; inkstream convert makes safetensors of it in a confined "
    "process",
}
"""File name suffixes that are not read -> what to do."""


def remedy(needed: str, names: set[str]) -> str:
    """How to get the missing file, by the other names of the directory or repository; begins with "; " or is empty."""
    if needed == "tokenizer.json":
        older = sorted(names & {"tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"})
        source = f" from {older[0]}" if older else ""
        return f"; create it{source} with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(DIR)"
    if "adapter_config.json" in names:
        return f"; this is an adapter: {_MERGE}"
    if needed == "config.json" and "snapshots" in names:
        return "; in the Hugging Face cache, pass the revision folder under snapshots/"
    if needed == WEIGHTS_FILE and any(re.fullmatch(r"model-.*\.safetensors", name) for name in names):
        return f", and {INDEX_FILE} is missing from the shards"
    for suffixes, how in _CONVERSIONS.items():
        if unread := sorted(name for name in names if name.endswith(suffixes)):
            return f"; {unread[0]} is not read: {how}, {_GUIDE}"
    return ""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on disk, as the header of its file describes it."""

    name: str
    path: File
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of its first number in the file."""
    header: bytes = field(repr=False)
    """How the file begins, up to its first number: another file may lie there when the tensor is read."""
    strides: tuple[int, ...] | None = None
    """Numbers from one element to the next of each axis; None if the elements lie in order, as in safetensors."""
    plus: float = 0.0
    """Added to numbers of F32 that a format stores less this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSource:
    """A packed matrix of a weights directory, or those of several experts."""

    name: str
    path: File
    """Of the file that holds its codes."""
    format: PackedFormat
    shape: tuple[int, ...]
    """[R, C], or [experts, R, C], which are read as the rows of one matrix."""
    load: Callable[[], PackedMatrix] = field(repr=False)

    def read(self) -> PackedMatrix:
        """Raises CheckpointError."""
        try:
            matrix = self.load()
            matrix.check()
        except ValueError as error:
            raise CheckpointError(
                str(error) if isinstance(error, CheckpointError) else f"{self.path}: {self.name} {error}"
            ) from None
        rows = math.prod(self.shape[:-1])
        assert (matrix.format, matrix.shape) == (self.format, (rows, self.shape[-1]))
        return matrix


def read_header(path: File) -> dict[str, StoredTensor]:
    """Name -> tensor. Raises CheckpointError, also if the file is not as long as its header says.

    safetensors checks the header: https://github.com/huggingface/safetensors. A longer one than a model needs is
    refused before, by its length in the first 8 bytes, because it would take memory.
    """
    try:
        real = regular_file(path)
        with real.open("rb") as file:
            start = file.read(64)
            reject_lfs_pointer(path, start)
            if (length := int.from_bytes(start[:8], "little")) > MAX_JSON_BYTES:
                raise CheckpointError(f"{path}: the header has {length} bytes, more than {MAX_JSON_BYTES}")
            file.seek(0)
            header = file.read(8 + length)
        with safe_open(real, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
        entries = json.loads(header[8:])
        for name in slices:
            if not isinstance(entries[name], dict):  # the library reads a list of the values, too
                raise CheckpointError(f"{path}: invalid header: the entry of {name} is not an object")
        starts = {name: len(header) + entries[name]["data_offsets"][0] for name in slices}
        return {
            name: StoredTensor(name, path, x.get_dtype(), tuple(x.get_shape()), starts[name], header)
            for name, x in slices.items()
        }
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (
        KeyError,
        json.JSONDecodeError,
        UnicodeDecodeError,
    ):  # of a header that safetensors has read without an error
        raise CheckpointError(f"{path}: was replaced while it was read") from None
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        truncated = ": it is truncated, or longer than its header says" if "ncomplete" in reason else ""
        raise CheckpointError(f"{path}: invalid header: {reason}{truncated}") from None


class _Index(Struct):
    weight_map: dict[str, Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors\Z")]]
    """Tensor name -> file name."""


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """All tensors of a weights directory."""

    source: File
    """The safetensors file, or the index of the shards."""
    tensors: Mapping[str, StoredTensor]
    packed: Mapping[str, PackedSource] = field(default_factory=dict)
    """Packed matrices of formats that know them as such; model/checkpoint/packed_sources.py finds others."""

    @property
    def paths(self) -> list[File]:
        """The files, sorted by name."""
        dense, packed = ({stored.path for stored in of.values()} for of in (self.tensors, self.packed))
        return sorted(dense | packed, key=str)


def version_of(hashes: Mapping[File, str]) -> str:
    """SHA-256 of the single file, or of the concatenated hexadecimal SHA-256s of its shards."""
    parts = list(hashes.values())
    return parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()


def weight_files(directory: Directory) -> list[File]:
    """The safetensors or GGUF files of a directory, in the order of version_of(). Raises CheckpointError."""
    if found := gguf_files(directory):
        return found
    whole, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
    if entry_exists(whole) or not entry_exists(index):
        return [whole]
    return [directory / shard for shard in sorted(shard_names(index))]


def gguf_files(directory: Directory) -> list[File]:
    """The GGUF files of a version (model/checkpoint/gguf_directory.py), in their order."""
    names = directory.files if isinstance(directory, WeightsVersion) else {}
    if {WEIGHTS_FILE, INDEX_FILE} & names.keys():
        return []
    return [directory / name for name in sorted(names) if name.endswith(".gguf")]


def find_tensors(directory: Directory) -> TensorIndex:
    """Indexes all tensors; each file must hold exactly what the index lists. Raises CheckpointError."""
    whole, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
    if entry_exists(whole) or not entry_exists(index):
        return TensorIndex(whole, read_header(whole))
    shard_of = read_struct(index, _Index).weight_map
    found: dict[str, StoredTensor] = {}
    for path in (directory / shard for shard in sorted(set(shard_of.values()))):
        for name, stored in read_header(path).items():
            if (indexed := shard_of.get(name)) != path.name:
                where = f"assigns to {indexed}" if indexed else "does not list"
                raise CheckpointError(f"{path}: holds {name}, which {index.name} {where}")
            found[name] = stored
    if missing := sorted(shard_of.keys() - found.keys()):
        raise CheckpointError(
            f"{directory / shard_of[missing[0]]}: {missing[0]} is missing, but {index.name} lists it there"
        )
    return TensorIndex(index, found)


def shard_names(index: File) -> set[str]:
    """File names of the shards. Raises CheckpointError."""
    return set(read_struct(index, _Index).weight_map.values())
