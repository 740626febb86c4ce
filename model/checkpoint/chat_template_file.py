"""Chat template of a weights directory.

Locations in transformers 5 and 4: chat_template.jinja, chat_template.json, then a field of tokenizer_config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from model.files import CheckpointError, entry_exists, read_bytes, read_struct
from model.tokenizer.tokenizer import read_names
from model.weights_version import Directory, File

_MAX_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplateFile:
    """Jinja template that renders chat messages to a prompt."""

    path: File
    """The file that holds it."""
    source: str
    names: dict[str, str]
    """Special tokens that the template may use: "bos_token", ... -> text."""


class _TemplateField(Struct):
    chat_template: str | list[Any] | None = None
    """A list has named templates; only the one named "default" is read."""


def read_chat_template(directory: Directory) -> ChatTemplateFile | None:
    """The chat template of the weights, or None. Raises CheckpointError if it cannot be read."""
    path: File = directory / "chat_template.jinja"
    source = None
    try:
        if entry_exists(path):
            source = read_bytes(path, _MAX_TEMPLATE_BYTES).decode()
        for name in ("chat_template.json", "tokenizer_config.json"):
            if source is None:
                path = directory / name
                source = _template_field(path)
                (source or "").encode()
    except UnicodeError:
        raise CheckpointError(f"{path}: is not UTF-8") from None
    return None if source is None else ChatTemplateFile(path=path, source=source, names=read_names(directory))


def _template_field(path: File) -> str | None:
    value = read_struct(path, _TemplateField, optional=True).chat_template
    if not isinstance(value, list):
        return value
    named = (each for each in value if isinstance(each, dict) and each.get("name") == "default")
    source = next(named, {}).get("template")
    if source is None or isinstance(source, str):
        return source
    raise CheckpointError(f"{path}: the chat template named default is no text")
