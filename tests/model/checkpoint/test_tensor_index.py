"""Tensor index: headers of safetensors files, weights in several files, links, and directories without weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from app.cli.check import main as check
from model.checkpoint.checkpoint import Checkpoint, load
from model.checkpoint.tensor_index import check_layout, read_header
from model.files import CheckpointError

INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"]
NORM = "model.norm.weight"


@pytest.fixture
def sharded(directory: Path) -> Path:
    """The tiny weights, cut into three."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {name: SHARDS[i % 3] for i, name in enumerate(tensors)}
    for shard in SHARDS:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == shard}, directory / shard)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


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
    assert many.weights.version == hashlib.sha256("".join(hashes).encode()).hexdigest()
    assert one.weights.version == hashlib.sha256((weights / "model.safetensors").read_bytes()).hexdigest()


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a path": (lambda m: m.update({NORM: "../x.safetensors"}), "weight_map"),
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


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_links_stay_inside_the_directory(tmp_path: Path, directory: Path, name: str) -> None:
    (directory / name).rename(directory / "real")
    (directory / name).symlink_to("real")
    version = _load(directory).weights.version
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
    assert _load(snapshot).weights.version == _load(weights).weights.version
    (tmp_path / "by-name").symlink_to(snapshot)
    assert _load(tmp_path / "by-name").weights.version == _load(weights).weights.version
    elsewhere = Path(shutil.copytree(snapshot, repository / "copies" / "0123abcd", symlinks=True))
    _refused(elsewhere, "leads out of the directory")


CASES = [
    ({"pytorch_model.bin"}, "model.safetensors", "pytorch_model.bin is not read: a pickle.*bring-your-model"),
    ({"ckpt.pt"}, "model.safetensors", "ckpt.pt is not read"),
    ({"x.gguf"}, "config.json", "x.gguf is not read: use the model that"),
    ({"model-00001-of-00002.safetensors"}, "model.safetensors", "index.json is missing"),
    (set(), "model.safetensors", "model.safetensors: no such file; a model directory has config.json"),
    (set(), "tokenizer.json", r"create it with transformers: AutoTokenizer.*save_pretrained\(DIR\)$"),
    ({"tokenizer.model"}, "tokenizer.json", "create it from tokenizer.model with transformers"),
    ({"vocab.json", "merges.txt"}, "tokenizer.json", "create it from merges.txt with transformers"),
    ({"snapshots"}, "config.json", "pass the revision folder under snapshots"),
    ({"adapter_config.json"}, "config.json", "an adapter: merge it"),
    ({"adapter_config.json", "adapter_model.safetensors"}, "", "adapter_config.json: the adapter would not be applied"),
]


@pytest.mark.parametrize(("there", "missing", "words"), CASES)
def test_what_is_missing_is_named_with_what_to_do(directory: Path, there: set[str], missing: str, words: str) -> None:
    check_layout(directory)
    if missing:
        (directory / missing).unlink()
    for name in there:
        (directory / name).touch()
    with pytest.raises(CheckpointError, match=words):
        check_layout(directory)


def test_what_is_no_directory_is_told(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = directory / "model.safetensors"
    words = {"no-such": "no such directory", "x" * 300: "cannot be read", file: "give the directory that contains it: "}
    for name, said in words.items():
        with pytest.raises(CheckpointError, match=said):
            check_layout(directory / name)
    (directory / "config.json").unlink()
    monkeypatch.chdir(directory)
    with pytest.raises(CheckpointError, match=r"^\./config\.json: no such file; a model directory has"):
        check_layout(Path())


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_called_one(directory: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert check([str(directory)]) == 2
    assert f"{name}: is only a pointer of git-lfs" in capsys.readouterr().err


A, B = (
    {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    {"dtype": "F16", "shape": [], "data_offsets": [24, 26]},
)


def _file(tmp_path: Path, header: Any, body: bytes = bytes(26), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    return path


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(()).half(), "c": torch.zeros(0, 4).bool(), "d": torch.ones(5)}
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(tensors, metadata={"format": "pt"}))
    found, content = read_header(path), path.read_bytes()
    header = content[: 8 + int.from_bytes(content[:8], "little")]
    expected = {"a": ("F32", (2, 3)), "b": ("F16", ()), "c": ("BOOL", (0, 4)), "d": ("F32", (5,))}
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == expected
    assert all(tensor.header == header for tensor in found.values())
    for name, tensor in tensors.items():
        assert content[found[name].start :][: tensor.nbytes] == tensor.numpy().tobytes()


_A = b'{"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, '
LIES: dict[str, tuple[Any, str]] = {
    "gap": ({"a": A, "b": B | {"data_offsets": [25, 27]}}, "b"),
    "overlap": ({"a": A, "b": B | {"data_offsets": [22, 24]}}, "b"),
    "shape": ({"a": A | {"shape": [3, 3]}, "b": B}, ""),
    "huge": ({"a": A | {"shape": [2**60, 2**60]}, "b": B}, "verflow"),
    "dtype": ({"a": A | {"dtype": "F31"}, "b": B}, "F31"),
    "twice": (_A + b'"b": {"dtype": "F16", "shape": [], "data_offsets": [24, 26]}, "b": 2}', "expected struct"),
    "deep": (b'{"a":' + b"[" * 100_000, ""),
}


@pytest.mark.parametrize("kind", LIES)
def test_a_lie_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    """The words are the library's."""
    header, words = LIES[kind]
    with pytest.raises(CheckpointError, match=f"x.safetensors: invalid header: .*{words}") as caught:
        read_header(_file(tmp_path, header))
    assert str(caught.value).isprintable()


def test_a_header_is_refused_by_its_size_before_it_is_read(tmp_path: Path) -> None:
    for length in (2**64 - 1, 200, 0):
        with pytest.raises(CheckpointError, match=r"x.safetensors: (invalid header|the header has \d+ bytes, more)"):
            read_header(_file(tmp_path, {"a": A, "b": B}, length=length))
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 40))
        file.truncate(1 << 41)  # takes no disk
    with pytest.raises(CheckpointError, match="has 1099511627776 bytes, more than"):
        read_header(path)
    for content in (b"", b"1234567"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"x\.safetensors: "):
            read_header(path)
