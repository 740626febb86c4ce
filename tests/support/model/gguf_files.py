"""Small GGUF files, written by the gguf package, and blocks of random numbers."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from model.gguf.blocks import PACKED_FORMATS
from model.gguf.gguf_file import SCALARS
from model.number_formats import Array

_SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Where blocks have float16 numbers."""


def random_blocks(name: str, *, rows: int, columns: int, seed: int) -> Array:
    """Blocks of a type, uint8 [rows, blocks, bytes]: random bits, but for scales, which are finite and not tiny."""
    random = np.random.default_rng(seed)
    per_block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = random.integers(0, 256, (rows, columns // per_block, n_bytes), np.uint8)
    for at in _SCALES[name]:
        scales = random.uniform(-2, 2, blocks.shape[:2]).astype("<f2")
        scales[random.random(scales.shape) < 0.1] = random.choice([0.0, -0.0])
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = random.integers(100, 150, blocks.shape[:2])
    return blocks


def unpacked(name: str, blocks: Array) -> Array:
    """The numbers of blocks by the gguf package, float32 [rows, columns]."""
    rows = blocks.reshape(len(blocks), -1)
    numbers: Array = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])
    return numbers


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Array | tuple[str, Array]],
    *,
    alignment: int | None = None,
) -> Path:
    """A file with these keys and tensors: arrays of numbers, or the name of a quantized type and its blocks."""
    writer = gguf.GGUFWriter(path, architecture)
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        add_value(writer, key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            kind, blocks = tensor
            writer.add_tensor(name, blocks.reshape(*blocks.shape[:-2], -1), raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(name, tensor)
    write_whole(writer)
    return path


def write_whole(writer: gguf.GGUFWriter) -> None:
    """Writes the file, and closes it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_array(path: Path, key: str, kind: int, content: bytes = b"") -> Path:
    """Adds a key with an array to a file that is aligned to 32 bytes. kind: number of the type; texts are empty."""
    whole, size = path.read_bytes(), struct.calcsize({**SCALARS, 8: "Q"}[kind])
    n_keys = int.from_bytes(whole[16:24], "little")
    array = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IIQ", 9, kind, len(content) // size) + content
    filler = struct.pack("<Q", 6) + b"filler" + struct.pack("<IQ", 8, n_filler := (-len(array) - 26) % 32)
    added = array + filler + bytes(n_filler)
    path.write_bytes(whole[:16] + struct.pack("<Q", n_keys + 2) + added + whole[24:])
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a key with the type that its value suggests, or as (value, type)."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value) if value >= 0 else writer.add_int32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            writer.add_key_value(key, *value)


def small_file(path: Path) -> Path:
    """A file with a value of each type, a small vocabulary, and a tensor of each packed type."""
    kinds = gguf.GGUFValueType
    numbers = {kind: (200 if kind.name.startswith("U") else -100, kind) for kind in kinds if "INT" in kind.name}
    metadata: dict[str, Any] = {f"test.{kind.name.lower()}": value for kind, value in numbers.items()}
    metadata |= {"test.float32": 0.5, "test.float64": (0.1, kinds.FLOAT64), "test.bool": True}
    metadata |= {"general.name": "a small caf\u00e9", "test.floats": [0.5, -1.5], "test.bools": [True, False]}
    metadata |= {"tokenizer.ggml.tokens": [f"token {i} \u00e9" for i in range(40)], "test.none": ([], kinds.ARRAY)}
    del metadata["test.none"]  # the package writes no empty arrays
    tensors: dict[str, Any] = {
        f"blk.0.{name.lower()}.weight": (name, random_blocks(name, rows=2, columns=256, seed=i))
        for i, name in enumerate(PACKED_FORMATS)
    }
    random = np.random.default_rng(0)
    tensors |= {"norm.weight": random.normal(size=8).astype(np.float32), "half": np.ones((2, 3, 4), np.float16)}
    return write_gguf(path, "llama", metadata, tensors)
