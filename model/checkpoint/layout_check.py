"""Checks which files a weights directory has, explains what is missing, and reads its chat template."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.files import CheckpointError, is_there, names_in, read_bytes, read_json
from model.tokenizer.tokenizer import read_names

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


# Files of transformers 5 and 4: chat_template.jinja, else chat_template.json, else a field of tokenizer_config.json.

_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplateFile:
    """A program in the language of Jinja that makes one text of the messages of a chat."""

    source: str
    names: dict[str, str]
    """What it may call the special tokens: "bos_token" and its like."""


def read_chat_template(directory: Path) -> ChatTemplateFile | None:
    """None where the weights bring none. Raises CheckpointError for one that cannot be read."""
    path = directory / "chat_template.jinja"
    if is_there(path):
        try:
            source: str | None = read_bytes(path, _MOST_BYTES).decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{path}: is not UTF-8") from None
    else:
        older = (directory / name for name in ("chat_template.json", "tokenizer_config.json"))
        source = next((found for path in older if (found := _field(path)) is not None), None)
    return None if source is None else ChatTemplateFile(source=source, names=read_names(directory))


def _field(path: Path) -> str | None:
    value = read_json(path, optional=True).get("chat_template")
    if isinstance(value, list):
        value = next((entry.get("template") for entry in value if _is_default(entry)), None)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise CheckpointError(f"{path}: chat_template holds half a character (a lone surrogate)") from None
        return value
    raise CheckpointError(f"{path}: chat_template is neither a text nor a list of named ones")


def _is_default(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("name") == "default"
