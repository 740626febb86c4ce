"""Weights directories that must never be served, written by this suite's own safetensors writer."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.redteam.service import Launcher

PROOFS = ("manifest.json", "golden.json")
"""What directories from elsewhere do not have; with them, changed tensors would be noticed by their hash."""


class TensorFile:
    """A safetensors file as its header and one block of data: enough to rewrite it in wrong ways."""

    def __init__(self, path: Path) -> None:
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        self.header: dict[str, Any] = json.loads(raw[8 : 8 + length])
        self.data = bytearray(raw[8 + length :])

    def names(self) -> list[str]:
        return sorted(name for name in self.header if name != "__metadata__")

    def fill(self, name: str, pattern: bytes, *, values: int | None = None) -> None:
        """Repeats the bytes of one number over a tensor or over its first values."""
        begin, end = self.header[name]["data_offsets"]
        count = (end - begin) // len(pattern)
        count = count if values is None else min(values, count)
        self.data[begin : begin + count * len(pattern)] = pattern * count

    def number(self, name: str, value: float) -> bytes:
        """The value in the tensor's own format."""
        if self.header[name]["dtype"] == "BF16":
            return struct.pack("<f", value)[2:]
        return struct.pack({"F16": "<e", "F32": "<f"}[self.header[name]["dtype"]], value)

    def to_bytes(self) -> bytes:
        header = json.dumps(self.header).encode()
        return struct.pack("<Q", len(header)) + header + bytes(self.data)


def copied_weights(launcher: Launcher) -> Path:
    """A copy of the weights without golden.json and manifest, like most directories."""
    number = len(list(launcher.directory.glob("weights-*")))
    path = launcher.directory / f"weights-{number}"
    shutil.copytree(launcher.weights, path, ignore=shutil.ignore_patterns(*PROOFS))
    return path


def _edited(edit: Callable[[TensorFile, Random], None]) -> Callable[[Path, Random], None]:
    """Edits the tensors of a directory."""

    def change(path: Path, rng: Random) -> None:
        tensors = TensorFile(path / "model.safetensors")
        edit(tensors, rng)
        (path / "model.safetensors").write_bytes(tensors.to_bytes())

    return change


def _filled(value: float, share: float = 1.0, *, names: str = "", values: int | None = None) -> Callable[..., None]:
    """Writes one number over a share of the tensors with such names, or over their first values.

    1e30 is finite, and far outside what a model learns: in norms alone it makes every activation overflow.
    """

    def edit(tensors: TensorFile, rng: Random) -> None:
        found = [name for name in tensors.names() if names in name]
        for name in rng.sample(found, max(1, int(share * len(found)))):
            tensors.fill(name, tensors.number(name, value), values=values)

    return _edited(edit)


@_edited
def _transpose(tensors: TensorFile, rng: Random) -> None:
    name = rng.choice([name for name in tensors.names() if len(set(tensors.header[name]["shape"])) == 2])
    tensors.header[name]["shape"].reverse()


@_edited
def _offsets(tensors: TensorFile, rng: Random) -> None:
    entry = tensors.header[rng.choice(tensors.names())]
    begin, end = entry["data_offsets"]
    entry["data_offsets"] = rng.choice([[begin - 2, end], [begin, end + 2**40], [end, begin], [-4, end], [0, 0]])


@_edited
def _dtype(tensors: TensorFile, rng: Random) -> None:
    entry = tensors.header[rng.choice(tensors.names())]
    entry["dtype"] = rng.choice(["I16", "U16", "F64", "I8", "BOOL", "Q4", ""])


def _truncate(path: Path, rng: Random) -> None:
    file = path / "model.safetensors"
    os.truncate(file, rng.randrange(file.stat().st_size))


def _config(path: Path, rng: Random) -> None:
    config = json.loads((path / "config.json").read_text())
    heads = ["num_key_value_heads", "head_dim"]
    name = rng.choice(["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", *heads])
    config[name] = rng.choice([0, -1, 7, 2**31, 2**63, 1e9, "384", None, [1]])
    (path / "config.json").write_text(json.dumps(config))


def _index(path: Path, rng: Random) -> None:
    """Shards that lead out of the directory."""
    names = TensorFile(path / "model.safetensors").names()
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    shard = rng.choice(["../../../../etc/passwd", "/dev/zero", "/proc/self/mem", "", "a\x00b", "/dev/stdin", "."])
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))


def _hostile_json(path: Path, rng: Random) -> None:
    name = rng.choice(["config", "tokenizer", "generation_config", "tokenizer_config"])
    content = rng.choice([
        "[" * 100_000, '{"a":' * 50_000, "", "null", "[]", "NaN", '{"a": 1e99999}', "9" * 5000, "\x00", '"\\ud800"',
    ])  # fmt: skip
    (path / f"{name}.json").write_text(content)


KINDS: dict[str, Callable[[Path, Random], None]] = {
    "exploding: every norm 1e30": _filled(1e30, names="norm"),
    "exploding: a few tensors 3e38": _filled(3e38, 0.15),
    "exploding: every tensor 1e30": _filled(1e30),
    "one NaN": _filled(float("nan"), 0.0, values=1),
    "one infinity": _filled(float("inf"), 0.0, values=1),
    "transposed shape": _transpose,
    "wrong offsets": _offsets,
    "wrong dtype": _dtype,
    "truncated": _truncate,
    "hostile config": _config,
    "hostile index": _index,
    "hostile JSON": _hostile_json,
    "all zeros": _filled(0.0),
}
