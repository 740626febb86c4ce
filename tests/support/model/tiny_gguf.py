"""A tiny model as a GGUF file, with a tokenizer and a chat template."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.model.gguf_conversion import write_converted
from tests.support.model.gguf_files import write_whole
from tests.support.model.gguf_metadata import gguf_metadata
from tests.support.model.tiny_models import VOCAB, tiny_weights

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def tiny_gguf(path: Path, kind: str = "Q8_0", **changes: Any) -> Path:
    """Writes the model of tiny_weights(**changes), whose tokens end at its EOS. Its directory lies beside the file."""
    directory = tiny_weights(path.parent / f"original of {path.stem}", **changes)
    return write_converted(directory, path, kind, tokenizer=tiny_tokenizer(directory))


def tiny_tokenizer(weights: Path) -> dict[str, Any]:
    """Metadata of the tokenizer of tiny_weights(), with a chat template."""
    raw = json.loads((weights / "tokenizer.json").read_text())
    eos = json.loads((weights / "config.json").read_text())["eos_token_id"]
    fields = {"bos_token_id": eos, "eos_token_id": eos, "add_bos_token": False}
    tokenizer = gguf_metadata(raw, pre="gpt-2", rows=VOCAB, **fields)
    return {**tokenizer, "tokenizer.chat_template": TEMPLATE}


def fuse_qkv(path: Path, fused: Path) -> Path:
    """Writes the file of an architecture without key-value groups again, with q, k and v of a layer as one tensor."""
    reader = gguf.GGUFReader(path)
    fields = {field.name: field for field in reader.fields.values() if not field.name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(fused, fields.pop("general.architecture").contents())
    for field in fields.values():
        kind, *inner = field.types
        writer.add_key_value(field.name, field.contents(), kind, *inner[-1:])
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    for name, data in tensors.items():
        if ".attn_q." in name:
            parts = [tensors[name.replace(".attn_q.", f".attn_{each}.")] for each in "qkv"]
            writer.add_tensor(name.replace(".attn_q.", ".attn_qkv."), np.concatenate(parts))
        elif not re.search(r"\.attn_[kv]\.", name):
            writer.add_tensor(name, data)
    write_whole(writer)
    return fused


def tiny_series(folder: Path, count: int = 2) -> list[Path]:
    """Writes the model of tiny_gguf() as a series."""
    whole = tiny_gguf(folder / "whole.gguf")
    reader = gguf.GGUFReader(whole)
    paths = []
    for number in range(count):
        path = folder / f"tiny-{number + 1:05}-of-{count:05}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for field in reader.fields.values():
            if number == 0 and not field.name.startswith(("GGUF.", "general.architecture")):
                kind, *inner = field.types
                writer.add_key_value(field.name, field.contents(), kind, *inner[-1:])
        for tensor in reader.tensors[number::count]:
            shape = None if tensor.data.dtype.kind == "f" else tensor.data.shape
            writer.add_tensor(tensor.name, tensor.data, raw_shape=shape, raw_dtype=tensor.tensor_type)
        write_whole(writer)
        paths.append(path)
    whole.unlink()
    return paths
