"""Headers of GGUF files: what the gguf package writes is read, and everything else is refused in one line."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest

from model.files import CheckpointError
from model.gguf.ggml_types import GGML_TYPES
from model.gguf.gguf_file import MAX_HEADER_BYTES, GgufFile, MetadataArray
from tests.support.model.gguf_files import small_file, write_gguf
from tests.support.model.gguf_mutations import failures, mutated, read_all


def _plain(value: Any) -> Any:
    return value.items() if isinstance(value, MetadataArray) else value


def _random_value(random: Random) -> Any:
    kinds = gguf.GGUFValueType
    words = ["", "a", "caf\u00e9", "\u4e2d\u6587 \U0001f98a", "x" * random.randrange(300)]
    values: list[Any] = [
        random.choice(words),
        random.random() < 0.5,
        random.randrange(2**32),
        (random.randrange(2**64), kinds.UINT64),
        (-random.randrange(2**63), kinds.INT64),
        (random.randrange(-128, 128), kinds.INT8),
        (random.randrange(2**16), kinds.UINT16),
        (random.uniform(-1e300, 1e300), kinds.FLOAT64),
        struct.unpack("<f", struct.pack("<f", random.uniform(-1e3, 1e3)))[0],
        [random.choice(words) for _ in range(random.randrange(1, 50))],
        [random.randrange(-(2**31), 2**31) for _ in range(random.randrange(1, 50))],
        [random.random() < 0.5 for _ in range(random.randrange(1, 9))],
    ]
    return random.choice(values)


@pytest.mark.parametrize("seed", range(30))
def test_random_files_of_the_package_are_read_as_it_reads_them(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    metadata = {f"key.{i}": _random_value(random) for i in range(random.randrange(20))}
    tensors: dict[str, Any] = {}
    for i in range(random.randrange(8)):
        number, kind = random.choice(list(GGML_TYPES.items()))
        if kind.name not in ("F32", "F16") and kind.block == 1:
            continue
        sizes = [random.randrange(1, 5) for _ in range(random.randrange(3))]
        if kind.block == 1:
            tensors[f"tensor {i}"] = np.zeros((*sizes, 5), kind.name.lower().replace("f", "float"))
        else:
            blocks = np.zeros((*sizes, random.randrange(1, 4), kind.n_bytes), np.uint8)
            tensors[f"tensor {i}"] = (gguf.GGMLQuantizationType(number).name, blocks)
    alignment = random.choice([None, 8, 32, 64, 4096])
    path = write_gguf(tmp_path / "a.gguf", "llama", metadata, tensors, alignment=alignment)
    found, expected = GgufFile.read(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in expected.fields.items() if not key.startswith("GGUF.")}
    assert {key: _plain(value) for key, value in found.metadata.items()} == fields
    assert list(found.tensors) == [tensor.name for tensor in expected.tensors]
    for tensor in expected.tensors:
        mine = found.tensors[tensor.name]
        assert (mine.type.name, mine.start, mine.n_bytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
        assert mine.shape == tuple(tensor.shape.tolist()[::-1])


def test_versions_2_and_3_are_read(tmp_path: Path) -> None:
    path = small_file(tmp_path / "a.gguf")
    content = path.read_bytes()
    assert GgufFile.read(path).version == 3
    path.write_bytes(content[:4] + struct.pack("<I", 2) + content[8:])
    assert GgufFile.read(path).version == 2
    assert GgufFile.read(path).beginning == path.read_bytes()[: len(GgufFile.read(path).beginning)]


def _key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def _tensor(name: str, sizes: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return struct.pack("<Q", len(name)) + name.encode() + dims + struct.pack("<IQ", kind, offset)


def _file(keys: list[bytes], tensors: list[bytes], n_bytes: int = 64, version: int = 3) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys + tensors)
    return header + bytes(-len(header) % 32 + n_bytes)


_TEXTS = struct.pack("<IQ", 8, 2) + struct.pack("<Q", 2) + b"ab"
_REFUSED: list[tuple[bytes, str]] = [
    (b"", "not a GGUF file"),
    (b"GGU", "not a GGUF file"),
    (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
    (b"lmgg" + bytes(60), "before GGUF"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
    (b"GGUF" + bytes(4), "truncated"),
    (_file([], [], version=1), "version 1, which is not supported, only"),
    (_file([], [], version=4), "version 4"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "big-endian"),
    (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 1), "9223372036854775808 tensors"),
    (b"GGUF" + struct.pack("<IQQ", 3, 1, 2**40), "1099511627776 keys"),
    (b"GGUF" + struct.pack("<IQQ", 3, 1, 1), "truncated"),
    (_file([_key("a", 13, bytes(8))], []), "'a' has a value of the unknown type 13"),
    (_file([_key("a", 9, struct.pack("<IQ", 9, 1) + bytes(40))], []), "'a' has an array of arrays"),
    (_file([_key("a", 9, struct.pack("<IQ", 77, 1))], []), "'a' has an array of the unknown type 77"),
    (_file([_key("a", 9, struct.pack("<IQ", 4, 2**62))], []), "truncated"),
    (_file([_key("a", 9, struct.pack("<IQ", 8, 2**62))], []), "truncated"),
    (_file([_key("a", 9, struct.pack("<IQQ", 8, 1, 2**63))], []), "truncated"),
    (_file([_key("a", 8, struct.pack("<Q", 2**64 - 1))], []), "truncated"),
    (_file([_key("a", 8, struct.pack("<Q", 2) + b"\xff\xff")], []), "'a' has a text that is not UTF-8"),
    (_file([_key("a", 4, bytes(4)), _key("a", 4, bytes(4))], []), "the metadata key 'a' twice"),
    (_file([_key("general.alignment", 4, struct.pack("<I", 33))], []), "general.alignment 33 is not a power of 2"),
    (_file([_key("general.alignment", 4, struct.pack("<I", 0))], []), "general.alignment 0"),
    (_file([_key("general.alignment", 4, struct.pack("<I", 2**31))], []), "general.alignment 2147483648"),
    (_file([_key("general.alignment", 8, struct.pack("<Q", 1) + b"8")], []), "general.alignment '8'"),
    (_file([], [_tensor("t", (1, 1, 1, 1, 1))]), "'t' has 5 dimensions"),
    (_file([], [_tensor("t", (4,), kind=5)]), "'t' has the unknown type 5"),
    (_file([], [_tensor("t", (4, 0))]), "shape .0, 4."),
    (_file([], [_tensor("t", (48,), kind=2)]), "multiple of 32"),
    (_file([], [_tensor("t", (4,), offset=3)]), "begins at 3"),
    (_file([], [_tensor("t", (4,)), _tensor("t", (4,), offset=32)]), "the tensor 't' twice"),
    (_file([], [_tensor("t", (9,)), _tensor("u", (4,), offset=32)]), "'u' overlaps"),
    (_file([], [_tensor("t", (17,))]), "truncated: it has .* and 't' ends at"),
    (_file([], [_tensor("t", (2**63, 2**63))]), "truncated"),
    (_file([], [_tensor("t", (4,), offset=2**62)]), "truncated"),
    (_file([], [_tensor("t" * 300, (4,))]), "a name of 300 bytes"),
    (_file([], [_tensor("t", (4,))], n_bytes=100_000), "follow the last tensor"),
]


@pytest.mark.parametrize(("content", "reason"), _REFUSED, ids=[reason for _, reason in _REFUSED])
def test_bad_files_are_refused_in_one_line(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as error:
        GgufFile.read(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_valid_counterparts_of_bad_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    tensors = [_tensor("t", (8,)), _tensor("u", (4,), offset=32)]
    path.write_bytes(_file([_key("a", 9, _TEXTS + struct.pack("<Q", 0)), _key("b", 7, b"\1")], tensors))
    found = GgufFile.read(path)
    assert found.metadata["a"].items() == ["ab", ""] and found.metadata["b"] is True
    assert [found.tensors[name].start for name in "tu"] == [192 - 32, 192]


def test_a_header_without_end_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    count = 2**30
    with path.open("wb") as file:
        file.write(_file([_key("a", 9, struct.pack("<IQ", 8, count))], [], n_bytes=0)[:49])
        file.truncate(8 * count)
    started = time.process_time()
    with pytest.raises(CheckpointError, match=f"header has more than {MAX_HEADER_BYTES} bytes"):
        GgufFile.read(path)
    assert time.process_time() - started < 10


def test_the_largest_tokenizers_are_read_in_bounded_memory(tmp_path: Path) -> None:
    tokens = [f"token number {i}" for i in range(262_144)]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(i) for i in range(262_144)],
        "tokenizer.ggml.merges": [f"{i} {i}" for i in range(300_000)],
    }
    path = write_gguf(tmp_path / "large.gguf", "llama", metadata, {})
    tracemalloc.start()
    found = GgufFile.read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < path.stat().st_size + (1 << 20)
    assert found.metadata["tokenizer.ggml.tokens"].items() == tokens


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(CheckpointError, match=str(path)):
            GgufFile.read(path)


def test_mutated_files_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    """python -m tests.support.model.gguf_mutations runs 10,000 of them."""
    tracemalloc.start()
    try:
        assert failures(seed=1, count=200) == []
        assert failures(seed=2, count=60, of_models=True) == []
    finally:
        tracemalloc.stop()
    original = small_file(tmp_path / "small.gguf").read_bytes()
    outcomes = []
    for number in range(200):
        (tmp_path / "mutated.gguf").write_bytes(mutated(original, Random(f"1/{number}")))
        outcomes.append(read_all(tmp_path / "mutated.gguf"))
    assert 60 < sum(map(bool, outcomes)) < 195  # some change only numbers
    assert len({line.partition(": ")[2][:20] for line in outcomes}) > 12
