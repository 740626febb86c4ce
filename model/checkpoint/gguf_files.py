"""The other files of a weights directory, made from the metadata of a GGUF file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from model.files import CheckpointError
from model.gguf.gguf_file import GgufFile, MetadataArray
from model.gguf.gguf_model import GgufModel
from model.tokenizer import gguf_tokenizer
from model.tokenizer.gguf_vocabulary import ARRAYS, CHARACTER_MAP, read_vocabulary
from model.tokenizer.size_limits import MAX_ENTRIES
from model.weights_version import File

Files = dict[str, bytes]
Remember = Callable[[str, Callable[[], Files]], Files]
"""(key, what makes files) -> the files, which are the same for the same key."""
_ENDS = "stop_ids"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of a config.json whose defaults in transformers are other tokens."""
_ROOT = Path(__file__).parents[2]
SOURCES = ("model/tokenizer/*.py", "model/gguf/*.py", "model/checkpoint/gguf_files.py")
"""The code that makes the tokenizer's files."""


def make_files(paths: Sequence[File], remember: Remember | None = None, *, with_tokenizer: bool = True) -> Files:
    """config.json, generation_config.json, and the tokenizer's files, of a model in these files.

    remember: may keep the tokenizer's files, since 262,144 tokens take seconds. Raises CheckpointError.
    """
    model, files, generation = GgufModel.read(paths), Files(), dict[str, object]()
    if with_tokenizer:
        files = remember(_key(model.files[0]), lambda: _tokenizer(model)) if remember else _tokenizer(model)
        ends = json.loads(files.pop(_ENDS))
        generation = {"eos_token_id": ends} if ends else {}
    generation = {**model.generation, **generation}
    config = {**model.config, **{name: generation.get(name) for name in _TOKENS}}
    made = {"config.json": config, "generation_config.json": generation}
    return {**files, **{name: (json.dumps(content) + "\n").encode() for name, content in made.items()}}


def _tokenizer(model: GgufModel) -> Files:
    """The tokenizer's files, and the tokens that end a text under a name that no file has."""
    try:
        metadata = _metadata(model.files[0])
        vocabulary = read_vocabulary(metadata)
        ends = json.dumps(gguf_tokenizer.stop_ids(vocabulary)).encode()
        return {**gguf_tokenizer.tokenizer_files(metadata, vocabulary), _ENDS: ends}
    except ValueError as error:
        raise CheckpointError(f"{model.files[0].path}: {error}") from None


def _metadata(file: GgufFile) -> dict[str, Any]:
    """The metadata, with the arrays of the tokenizer as plain values. Raises ValueError for a bad array."""
    metadata = dict(file.metadata)
    for key in ARRAYS:
        if isinstance(value := metadata.get(key), MetadataArray):
            metadata[key] = _array(key, value)
    return metadata


def _array(key: str, array: MetadataArray) -> Any:
    """The items of an array; those of a map of characters as bytes."""
    if key == CHARACTER_MAP and array.has_bytes:
        return array.content
    if array.count > MAX_ENTRIES:
        raise ValueError(f"{key} has {array.count} entries; at most {MAX_ENTRIES} are allowed")
    return array.items()


def _key(file: GgufFile) -> str:
    """SHA-256 of all that the tokenizer's files depend on: the metadata that were read, and the code."""
    digest = hashlib.sha256()
    for source in sorted(path for pattern in SOURCES for path in _ROOT.glob(pattern)):
        digest.update(source.read_bytes())
    for key, value in file.metadata.items():
        if isinstance(value, MetadataArray):
            digest.update(f"{key!r}: {value.kind} {value.count} {len(value.content)}\n".encode())
            digest.update(value.content)
        else:
            digest.update(f"{key!r}: {value!r}\n".encode())
    return digest.hexdigest()
