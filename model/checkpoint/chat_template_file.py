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
    tools_source: str | None = None
    """The template for requests with tools, if it is another one."""
    names: dict[str, str]
    """Special tokens that the template may use: "bos_token", ... -> text."""


class _TemplateField(Struct):
    chat_template: str | list[Any] | dict[str, Any] | None = None
    """A list or an object has named templates; those named "default" and "tool_use" are read, as in transformers."""


def read_chat_template(directory: Directory) -> ChatTemplateFile | None:
    """The chat template of the weights, or None. Raises CheckpointError if it cannot be read."""
    path: File = directory / "chat_template.jinja"
    source = tools_source = None
    try:
        if entry_exists(path):
            source = read_bytes(path, _MAX_TEMPLATE_BYTES).decode()
        for name in ("chat_template.json", "tokenizer_config.json"):
            if source is None:
                path = directory / name
                source, tools_source = _template_field(path)
                f"{source}{tools_source}".encode()
    except UnicodeError:
        raise CheckpointError(f"{path}: is not UTF-8") from None
    if source is None:
        return None
    return ChatTemplateFile(path=path, source=source, tools_source=tools_source, names=read_names(directory))


def _template_field(path: File) -> tuple[str | None, str | None]:
    """The template, and another one for requests with tools, if there is one."""
    value = read_struct(path, _TemplateField, optional=True).chat_template
    if value is None or isinstance(value, str):
        return value, None
    if isinstance(value, list):
        items = [each for each in value if isinstance(each, dict) and isinstance(each.get("name"), str)]
        value = {each["name"]: each.get("template") for each in items}
    for name in ("default", "tool_use"):
        if not isinstance(value.get(name), str | None):
            raise CheckpointError(f"{path}: the chat template named {name} is no text")
    return value.get("default"), value.get("tool_use")
