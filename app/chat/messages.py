"""Messages between app/chat/template.py and its worker process."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class RenderJob(Struct):
    """A request: the messages to render, and the template's variables."""

    source: str
    variables: dict[str, Any]


class RenderResult(Struct):
    """A response: the rendered text, or an error."""

    text: str = ""
    error: str = ""
