"""The chat template that a weights directory brings: found and read, never run here.

Files of transformers 5 and 4: chat_template.jinja, else chat_template.json, else a field of tokenizer_config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.files import CheckpointError, is_there, read_bytes, read_json
from model.tokenizer.special_tokens import read_names

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
