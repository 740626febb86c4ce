"""What is said between app/chat/template.py and the process that runs templates. Imports no Jinja."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class RenderJob(Struct):
    """A question: what to render, and with which variables."""

    source: str
    variables: dict[str, Any]


class RenderResult(Struct):
    """An answer: a text, or why there is none."""

    text: str = ""
    error: str = ""
