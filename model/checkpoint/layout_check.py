"""Whether the files of a weights directory are there, and what to do where others are. Reads none of them."""

from __future__ import annotations

import os
from pathlib import Path

from model.file_snapshot import names_in
from model.files import CheckpointError, is_there

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_BRING = "docs/bring-your-model.md tells how to make it"


def check_layout(directory: Path, *, with_tokenizer: bool = True) -> None:
    """Raises CheckpointError for what can be seen at once."""
    if (names := names_in(directory)) is None:
        names = _listed(directory)
    for needed in (("config.json",), (WEIGHTS_FILE, INDEX_FILE), *[("tokenizer.json",)] * with_tokenizer):
        if not any(is_there(directory / name) for name in needed):
            raise CheckpointError(f"{directory / needed[0]}: no such file{_instead(needed[0], names)}")


def _listed(directory: Path) -> set[str]:
    """The names in the directory. Raises CheckpointError."""
    if not os.path.isdir(directory):  # noqa: PTH112 (pathlib raises for names too long and folders not to be entered)
        kind = "is not a directory" if os.path.exists(directory) else "no such directory"  # noqa: PTH110
        raise CheckpointError(f"{directory}: {kind}; train a model with inkstream train, or bring one")
    try:
        return set(os.listdir(directory))  # noqa: PTH208
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read ({error.strerror})") from None


def _instead(needed: str, names: set[str]) -> str:
    """What is there in its place, and what to make of it."""
    if "adapter_config.json" in names and needed != "tokenizer.json":
        return "; this is an adapter: merge it into its model and save that"
    if needed == "config.json":
        return (
            "; of a download of the Hugging Face hub, give the folder below snapshots" if "snapshots" in names else ""
        )
    if needed == "tokenizer.json":
        older = sorted(names & {"tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"})
        how = "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers makes it of"
        return f"; {how} {older[0]}" if older else ""
    if any(name.startswith("model-") and name.endswith(".safetensors") for name in names):
        return f", and {INDEX_FILE} is missing from the shards"
    pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
    return f"; {pickles[0]} is not read, because a pickle can run code: {_BRING}" if pickles else ""
