"""The other files of a weights directory, made from the metadata of a GGUF file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from model.files import CheckpointError, regular_file
from model.gguf.gguf_file import GgufFile
from model.gguf.gguf_model import GgufModel
from model.tokenizer import gguf_tokenizer
from model.weights_version import File

Files = dict[str, bytes]
Remember = Callable[[str, Callable[[], Files]], Files]
"""(key, what makes files) -> the files, which are the same for the same key."""
_ENDS = "stop_ids"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of a config.json whose defaults in transformers are other tokens."""


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
        metadata = model.tokenizer_metadata()
        ends = json.dumps(gguf_tokenizer.stop_ids(metadata)).encode()
        return {**gguf_tokenizer.tokenizer_files(metadata), _ENDS: ends}
    except ValueError as error:
        raise CheckpointError(f"{model.files[0].path}: {error}") from None


def _key(file: GgufFile) -> str:
    """SHA-256 of all that the tokenizer's files depend on: the header, and the code that makes them."""
    digest = hashlib.sha256()
    for source in sorted(Path(gguf_tokenizer.__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    with regular_file(file.path).open("rb") as opened:
        digest.update(opened.read(file.header_bytes))
    return digest.hexdigest()
