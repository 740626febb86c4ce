"""The header of a safetensors file: valid ones are read, and every invalid one is named before the file is mapped."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from model.checkpoint.tensor_index import Entry, read_header
from model.files import CheckpointError

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
    expected = {"a": ("F32", (2, 3)), "b": ("F16", ()), "c": ("BOOL", (0, 4)), "d": ("F32", (5,))}
    assert read_header(path) == {name: Entry(*entry) for name, entry in expected.items()}


def test_the_example_of_these_tests_is_right(tmp_path: Path) -> None:
    assert read_header(_file(tmp_path, {"a": A, "b": B})) == {"a": Entry("F32", (2, 3)), "b": Entry("F16", ())}


LIES: dict[str, tuple[Any, str]] = {
    "gap": (
        {"a": A, "b": B | {"data_offsets": [25, 27]}},
        "b begins at byte 25, but the tensor before it ends at 24",
    ),
    "overlap": ({"a": A, "b": B | {"data_offsets": [22, 24]}}, "b begins at byte 22"),
    "late start": ({"a": A | {"data_offsets": [2, 26]}}, "a begins at byte 2"),
    "early end": ({"a": A}, "end at byte 24 of 26"),
    "late end": ({"a": A, "b": B | {"dtype": "F64", "data_offsets": [24, 32]}}, "need 32 bytes, but the file has 26"),
    "shape": ({"a": A | {"shape": [3, 3]}, "b": B}, "a takes 36 bytes by its shape, 24 by its data_offsets"),
    "negative": ({"a": A | {"shape": [-2, -3]}, "b": B}, "sizes of at least 0"),
    "backwards": ({"a": A | {"data_offsets": [24, 0]}, "b": B}, "24 bytes by its shape, -24"),
    "true": ({"a": A | {"shape": [True, 6]}, "b": B}, "sizes of at least 0"),
    "huge": ({"a": A | {"shape": [2**60, 2**60]}, "b": B}, "sizes of at least 0"),
    "dimensions": ({"a": A | {"shape": [1] * 9}, "b": B}, "up to 8 sizes"),
    "dtype": ({"a": A | {"dtype": "F31"}, "b": B}, "unknown dtype 'F31'"),
    "no dtype": ({"a": {"shape": [], "data_offsets": [0, 1]}}, "a must have dtype, shape and data_offsets"),
    "extra": ({"a": A | {"x": 1}, "b": B}, "nothing else"),
    "metadata": ({"__metadata__": {"a": 1}, "a": A, "b": B}, "__metadata__ must be an object of strings"),
    "twice": (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
    "list": (b"[]", "must hold a JSON object"),
    "utf-8": (b'{"\xff": 1}', "not JSON"),
    "deep": (b'{"a":' + b"[" * 100_000, "not JSON"),
    "nested": (b'{"a":' + b"[" * 40 + b"]" * 40 + b"}", "nested deeper"),
    "nan": (b'{"a": NaN}', "NaN is not a JSON number"),
}


@pytest.mark.parametrize("kind", LIES)
def test_a_lie_is_named(tmp_path: Path, kind: str) -> None:
    header, words = LIES[kind]
    with pytest.raises(CheckpointError, match=f"x.safetensors: invalid header: .*{words}") as caught:
        read_header(_file(tmp_path, header))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("length", "words"),
    [(2**64 - 1, "longer than the file"), (200, "longer than the file"), (0, "not JSON"), (5, "not JSON")],
)
def test_a_length_that_lies_is_named(tmp_path: Path, length: int, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_header(_file(tmp_path, {"a": A, "b": B}, length=length))


def test_a_header_is_refused_by_its_size_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 40))
        file.truncate(1 << 41)  # takes no disk
    with pytest.raises(CheckpointError, match="has 1099511627776 bytes, more than"):
        read_header(path)
    path.write_bytes(b"1234567")
    with pytest.raises(CheckpointError, match="7 bytes are too short"):
        read_header(path)
