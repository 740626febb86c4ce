"""Weights in several files, and links: each tensor is where the index says, each file is the directory's own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint.checkpoint import Checkpoint, load
from model.files import CheckpointError

INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"]
NORM = "model.norm.weight"


@pytest.fixture
def sharded(tmp_path: Path, weights: Path) -> Path:
    """The tiny weights, cut into three."""
    directory = Path(shutil.copytree(weights, tmp_path / "sharded"))
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    _write(directory, {name: SHARDS[i % 3] for i, name in enumerate(tensors)}, tensors)
    return directory


def _write(directory: Path, weight_map: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
    for shard in SHARDS:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == shard}, directory / shard)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _load(directory: Path) -> Checkpoint:
    return load(directory, device=torch.device("cpu"), dtype=torch.float32)


def _refused(directory: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        _load(directory)
    assert str(caught.value).startswith(str(directory)) and str(caught.value).isprintable()


def test_shards_load_as_the_one_file_does(sharded: Path, weights: Path) -> None:
    one, many = _load(weights), _load(sharded)
    expected, found = one.decoder.state_dict(), many.decoder.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    hashes = [hashlib.sha256((sharded / shard).read_bytes()).hexdigest() for shard in SHARDS]
    assert many.version == hashlib.sha256("".join(hashes).encode()).hexdigest()
    assert one.version == hashlib.sha256((weights / "model.safetensors").read_bytes()).hexdigest()


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a path": (lambda m: m.update({NORM: "../x.safetensors"}), "not a safetensors file name"),
    "no text": (lambda m: m.update({NORM: 3}), "not a safetensors file name"),
    "a lost shard": (lambda m: m.update({NORM: "gone.safetensors"}), r"gone\.safetensors: cannot be read"),
    "the wrong shard": (lambda m: m.update({NORM: next(s for s in SHARDS if s != m[NORM])}), f"{NORM}, .* assigns"),
    "not named": (lambda m: m.pop(NORM), f"holds {NORM}, which {INDEX} does not list"),
    "not there": (lambda m: m.update(surprise=SHARDS[0]), f"{SHARDS[0]}: surprise is missing"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_an_index_that_does_not_tell_the_truth_is_refused(sharded: Path, kind: str) -> None:
    change, words = CHANGES[kind]
    index = json.loads((sharded / INDEX).read_text())
    change(index["weight_map"])
    (sharded / INDEX).write_text(json.dumps(index))
    _refused(sharded, words)


def test_a_tensor_in_two_shards_or_twice_in_the_index_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    other = next(shard for shard in SHARDS if shard != index["weight_map"][NORM])
    doubled = json.dumps(index).replace(f'"{NORM}":', f'"{NORM}": "{other}", "{NORM}":')
    (sharded / INDEX).write_text(doubled)
    _refused(sharded, f"duplicate key '{NORM}'")
    (sharded / INDEX).write_text(json.dumps(index))
    tensors = load_file(sharded / other)
    save_file(tensors | {NORM: torch.ones(64)}, sharded / other)
    _refused(sharded, f"{other}: holds {NORM}, which {INDEX} assigns to")


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    content = (sharded / SHARDS[1]).read_bytes()
    (sharded / SHARDS[1]).write_bytes(content[:-4])
    _refused(sharded, f"{SHARDS[1]}: invalid header: .*truncated")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_links_stay_inside_the_directory(tmp_path: Path, weights: Path, name: str) -> None:
    directory = Path(shutil.copytree(weights, tmp_path / "linked"))
    (directory / name).rename(directory / "real")
    (directory / name).symlink_to("real")
    version = _load(directory).version
    (directory / "real").rename(tmp_path / "real")
    (directory / name).unlink()
    (directory / name).symlink_to(tmp_path / "real")
    _refused(directory, f"{name}: leads out of the directory")
    (directory / name).unlink()
    (directory / name).symlink_to(name)
    _refused(directory, f"{name}: cannot be read")
    (directory / name).unlink()
    os.mkfifo(directory / name)
    _refused(directory, f"{name}: is not a regular file")
    assert version


def test_the_layout_of_the_hub_cache_loads(tmp_path: Path, weights: Path) -> None:
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in weights.iterdir():
        shutil.copy(path, blobs / hashlib.sha256(path.read_bytes()).hexdigest())
        (snapshot / path.name).symlink_to(f"../../blobs/{hashlib.sha256(path.read_bytes()).hexdigest()}")
    assert _load(snapshot).version == _load(weights).version
    (tmp_path / "by-name").symlink_to(snapshot)
    assert _load(tmp_path / "by-name").version == _load(weights).version
    elsewhere = Path(shutil.copytree(snapshot, repository / "copies" / "0123abcd", symlinks=True))
    _refused(elsewhere, "leads out of the directory")
