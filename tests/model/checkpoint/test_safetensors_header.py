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


_A = b'{"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, '
LIES: dict[str, tuple[Any, str]] = {
    "gap": ({"a": A, "b": B | {"data_offsets": [25, 27]}}, "b"),
    "overlap": ({"a": A, "b": B | {"data_offsets": [22, 24]}}, "b"),
    "late start": ({"a": A | {"data_offsets": [2, 26]}}, "a"),
    "early end": ({"a": A}, "it is truncated, or longer"),
    "late end": ({"a": A, "b": B | {"dtype": "F64", "data_offsets": [24, 32]}}, "it is truncated, or longer"),
    "shape": ({"a": A | {"shape": [3, 3]}, "b": B}, ""),
    "negative": ({"a": A | {"shape": [-2, -3]}, "b": B}, "-2"),
    "backwards": ({"a": A | {"data_offsets": [24, 0]}, "b": B}, "a"),
    "true": ({"a": A | {"shape": [True, 6]}, "b": B}, "true"),
    "huge": ({"a": A | {"shape": [2**60, 2**60]}, "b": B}, "verflow"),
    "dtype": ({"a": A | {"dtype": "F31"}, "b": B}, "F31"),
    "no dtype": ({"a": {"shape": [], "data_offsets": [0, 1]}}, "missing field `dtype`"),
    "metadata": ({"__metadata__": {"a": 1}, "a": A, "b": B}, "expected a string"),
    "twice": (_A + b'"b": {"dtype": "F16", "shape": [], "data_offsets": [24, 26]}, "b": 2}', "expected struct"),
    "list": (b"[]", "sequence"),
    "utf-8": (b'{"\xff": 1}', ""),
    "deep": (b'{"a":' + b"[" * 100_000, ""),
    "nan": (b'{"a": NaN}', ""),
}


@pytest.mark.parametrize("kind", LIES)
def test_a_lie_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    """The words are the library's."""
    header, words = LIES[kind]
    with pytest.raises(CheckpointError, match=f"x.safetensors: invalid header: .*{words}") as caught:
        read_header(_file(tmp_path, header))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("length", [2**64 - 1, 200, 0, 5])
def test_a_length_that_lies_is_named(tmp_path: Path, length: int) -> None:
    with pytest.raises(CheckpointError, match=r"x.safetensors: (invalid header|the header has \d+ bytes, more than)"):
        read_header(_file(tmp_path, {"a": A, "b": B}, length=length))


def test_a_header_is_refused_by_its_size_before_it_is_read(tmp_path: Path) -> None:
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
