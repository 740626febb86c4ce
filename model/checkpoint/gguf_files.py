"""The other files of a weights directory, made from the metadata of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Sequence

from model.files import CheckpointError
from model.gguf.gguf_model import GgufModel
from model.tokenizer.gguf_tokenizer import stop_ids, tokenizer_files
from model.weights_version import File


def make_files(paths: Sequence[File]) -> dict[str, bytes]:
    """config.json, generation_config.json, and the tokenizer's files, of a model in these files.

    Raises CheckpointError.
    """
    model = GgufModel.read(paths)
    try:
        metadata = model.tokenizer_metadata()
        files, ends = tokenizer_files(metadata), stop_ids(metadata)
    except ValueError as error:
        raise CheckpointError(f"{paths[0]}: {error}") from None
    generation = {**model.generation, **({"eos_token_id": list(ends)} if ends else {})}
    made = {"config.json": model.config, "generation_config.json": generation}
    return {**files, **{name: (json.dumps(content) + "\n").encode() for name, content in made.items()}}
