"""Which file of a weights directory holds which tensor: model.safetensors, or shards with an index. Reads no tensor."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from model.checkpoint.layout_check import INDEX_FILE, WEIGHTS_FILE
from model.checkpoint.safetensors_header import Entry, read_header
from model.files import CheckpointError, is_there, read_json, sha256

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
