"""A tiny model as a GGUF file, with a tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.model.gguf_conversion import write_converted
from tests.support.model.gguf_metadata import gguf_metadata
from tests.support.model.tiny_models import tiny_weights

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def tiny_gguf(path: Path, kind: str = "Q8_0", **changes: Any) -> Path:
    """Writes the model of tiny_weights(**changes), whose tokens end at its EOS. Its directory lies beside the file."""
    directory = tiny_weights(path.parent / f"original of {path.stem}", **changes)
    raw = json.loads((directory / "tokenizer.json").read_text())
    eos = json.loads((directory / "config.json").read_text())["eos_token_id"]
    fields = {"bos_token_id": eos, "eos_token_id": eos, "add_bos_token": False}
    tokenizer = gguf_metadata(raw, pre="gpt-2", rows=320, **fields)
    return write_converted(directory, path, kind, tokenizer={**tokenizer, "tokenizer.chat_template": TEMPLATE})


def tiny_series(folder: Path, count: int = 2) -> list[Path]:
    """Writes the model of tiny_gguf() as a series."""
    import gguf

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
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    whole.unlink()
    return paths
