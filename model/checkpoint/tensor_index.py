"""Weights directory: its required files, and which safetensors file holds which tensor.

Explains what is missing, and reads each safetensors header before any tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from model.files import (
    MAX_JSON_BYTES,
    CheckpointError,
    entry_exists,
    read_bytes,
    read_json,
    regular_file,
    reject_lfs_pointer,
    sha256,
    snapshot_names,
    unfinished_run,
)
from model.tokenizer.tokenizer import read_names

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_GUIDE = "see docs/bring-your-model.md"
_MERGE = (
    "merge it into its base model with peft (merge_and_unload(), then save_pretrained() of the model and of the "
    "tokenizer), and use the result"
)
_WHERE_FROM = "train a model with inkstream train, bring one, or name one of the Hugging Face Hub: org/name"


def check_layout(directory: Path, *, with_tokenizer: bool = True) -> None:
    """Checks that the required files exist. Raises CheckpointError."""
    if (names := snapshot_names(directory)) is None:
        names = _list_names(directory)
    if problem := adapter_problem(names):
        raise CheckpointError(f"{directory / 'adapter_config.json'}: {problem}")
    if needed := missing_file(names, with_tokenizer=with_tokenizer):
        if command := unfinished_run(directory):
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
    if not os.path.isdir(directory):  # noqa: PTH112 (pathlib raises for names too long and folders not to be entered)
        if not os.path.exists(directory):  # noqa: PTH110
            raise CheckpointError(f"{directory}: no such directory; {_WHERE_FROM}")
        hint = remedy("config.json", {directory.name}) or f"; {_WHERE_FROM}"
        if directory.suffix in (".safetensors", ".bin", ".pt", ".pth", ".json"):
            hint = f"; give the directory that contains it: {directory.parent}"
        raise CheckpointError(f"{directory}: is not a directory{hint}")
    try:
        return set(os.listdir(directory))  # noqa: PTH208
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read ({error.strerror})") from None


def remedy(needed: str, names: set[str]) -> str:
    """How to get the missing file, by the other names of the directory or repository; begins with "; " or is empty."""
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
    if "adapter_config.json" in names and needed != "tokenizer.json":
        return f"; this is an adapter: {_MERGE}"
    if ggufs and needed != "tokenizer.json":
        return (
            f"; {ggufs[0]} is not read: use the model that the GGUF file was made from, which has safetensors, or "
            "unpack the file with transformers (from_pretrained(..., gguf_file=...)), " + _GUIDE
        )
    if needed == "config.json":
        return "; in the Hugging Face cache, pass the revision folder under snapshots/" if "snapshots" in names else ""
    if needed == "tokenizer.json":
        older = sorted(names & {"tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"})
        if older:
            how = "create it with AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers"
            return f"; {how} from {older[0]}"
        return "; save it beside the model: AutoTokenizer.from_pretrained(...).save_pretrained(DIR)"
    if any(name.startswith("model-") and name.endswith(".safetensors") for name in names):
        return f", and {INDEX_FILE} is missing from the shards"
    if pickles:
        return (
            f"; {pickles[0]} is not read, because a pickle can run code; convert it with transformers "
            f"(from_pretrained(...).save_pretrained(...)), {_GUIDE}"
        )
    return ""


# Locations in transformers 5 and 4: chat_template.jinja, chat_template.json, then a field of tokenizer_config.json.

_MAX_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplateFile:
    """Jinja template that renders chat messages to a prompt."""

    source: str
    names: dict[str, str]
    """Special tokens that the template may use: "bos_token", ... -> text."""


def read_chat_template(directory: Path) -> ChatTemplateFile | None:
    """The chat template of the weights, or None. Raises CheckpointError if it cannot be read."""
    path = directory / "chat_template.jinja"
    if entry_exists(path):
        try:
            source: str | None = read_bytes(path, _MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{path}: is not UTF-8") from None
    else:
        older = (directory / name for name in ("chat_template.json", "tokenizer_config.json"))
        source = next((found for path in older if (found := _template_field(path)) is not None), None)
    return None if source is None else ChatTemplateFile(source=source, names=read_names(directory))


def _template_field(path: Path) -> str | None:
    value = read_json(path, optional=True).get("chat_template")
    if isinstance(value, list):
        value = next((entry.get("template") for entry in value if _is_default(entry)), None)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise CheckpointError(f"{path}: chat_template contains a lone surrogate") from None
        return value
    raise CheckpointError(f"{path}: chat_template is neither a string nor a list of named templates")


def _is_default(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("name") == "default"


@dataclass(frozen=True, slots=True)
class Entry:
    """Header entry of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of its first number in the file."""
    header: bytes = field(repr=False)
    """How the file begins, up to its first number: another file may lie there when the tensor is read."""


def read_header(path: Path) -> dict[str, Entry]:
    """Name -> entry. Raises CheckpointError, also if the file is not as long as its header says.

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
        starts = _starts(header)
        return {name: Entry(x.get_dtype(), tuple(x.get_shape()), starts[name], header) for name, x in slices.items()}
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


def _starts(header: bytes) -> dict[str, int]:
    """Where each tensor begins, from a header that was checked, with its length in front."""
    entries = json.loads(header[8:])
    return {name: len(header) + entry["data_offsets"][0] for name, entry in entries.items() if name != "__metadata__"}


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
    """The safetensors file, or the index of the shards."""
    tensors: Mapping[str, StoredTensor]

    @property
    def paths(self) -> list[Path]:
        """The files, sorted by name."""
        return sorted({stored.path for stored in self.tensors.values()})

    def hashes(self, digest: Callable[[Path], str] = sha256) -> dict[Path, str]:
        """SHA-256 of each file, sorted by name. Raises CheckpointError.

        digest: computes or remembers that of a file.
        """
        return {path: digest(path) for path in self.paths}


def version_of(hashes: Mapping[Path, str]) -> str:
    """SHA-256 of the single file, or of the concatenated hexadecimal SHA-256s of its shards."""
    parts = list(hashes.values())
    return parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()


def find_tensors(directory: Path) -> TensorIndex:
    """Indexes all tensors; each file must hold exactly what the index lists. Raises CheckpointError."""
    whole, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
    if entry_exists(whole) or not entry_exists(index):
        return TensorIndex(whole, {name: StoredTensor(whole, entry) for name, entry in read_header(whole).items()})
    shard_of = _shards(index)
    found: dict[str, StoredTensor] = {}
    for path in sorted({directory / shard for shard in shard_of.values()}):
        for name, entry in read_header(path).items():
            if (indexed := shard_of.get(name)) != path.name:
                where = f"assigns to {indexed}" if indexed else "does not list"
                raise CheckpointError(f"{path}: holds {name}, which {index.name} {where}")
            found[name] = StoredTensor(path, entry)
    if missing := sorted(shard_of.keys() - found.keys()):
        raise CheckpointError(
            f"{directory / shard_of[missing[0]]}: {missing[0]} is missing, but {index.name} lists it there"
        )
    return TensorIndex(index, found)


def shard_names(index: Path) -> set[str]:
    """File names of the shards. Raises CheckpointError."""
    return set(_shards(index).values())


def _shards(index: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: weight_map must be an object of file names")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise CheckpointError(f"{index}: {name} is assigned to {shard!r}, which is not a safetensors file name")
    return weight_map
