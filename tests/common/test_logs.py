"""Log lines in the human-readable format, and the choice of the format."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from app.common import logs
from app.common.logs import REQUEST

COMPLETION: dict[str, Any] = {
    "request_id": "req-1",
    "method": "POST",
    "route": "/complete",
    "status": 200,
    "key": None,
    "outcome": "length",
    "duration_ms": 1234.5,
    "completion_tokens": 1200,
    "tokens_per_second": 987.65,
}
NO_TOKENS = {"completion_tokens": None, "tokens_per_second": None}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "200  POST /complete  1,200 tokens, 988 tokens/s, 1,234.5 ms, length"),
        ({"key": "alice", "stream": "req-0"},
         "200  POST /complete  1,200 tokens, 988 tokens/s, 1,234.5 ms, length, stream req-0, key alice"),
        ({"outcome": "disconnected"},
         "200  POST /complete  1,200 tokens, 988 tokens/s, 1,234.5 ms, disconnected, req-1"),
        ({"method": None, "route": None, "status": 408, "outcome": "timeout", **NO_TOKENS},
         "408  - (no route)  1,234.5 ms, timeout, req-1"),
        ({"method": "GET", "route": "/v1/models", "outcome": "ok", **NO_TOKENS}, "200  GET /v1/models  1,234.5 ms"),
    ],
)  # fmt: skip
def test_request_is_one_short_line_and_failures_name_its_id(changes: dict[str, Any], expected: str) -> None:
    assert _line("request", REQUEST, logging.INFO, COMPLETION | changes) == expected


@pytest.mark.parametrize(
    ("level", "expected"),
    [(logging.INFO, "x a=1"), (logging.WARNING, "warning: x a=1"), (logging.ERROR, "error: x a=1")],
)
def test_other_events_are_their_message_and_fields(level: int, expected: str) -> None:
    assert _line("x", "inkstream", level, {"a": 1, "b": None}) == expected


def _line(message: str, name: str, level: int, fields: dict[str, Any]) -> str:
    """The line without its time."""
    record = logging.LogRecord(name, level, "", 0, message, None, None)
    record.fields = fields
    time, _, line = logs._TextFormatter().format(record).partition("  ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", time)
    return line


@pytest.mark.parametrize(
    ("setting", "is_terminal", "expected"),
    [("auto", True, "text"), ("auto", False, "json"), ("text", False, "text"), ("json", True, "json")],
)
def test_only_format_auto_depends_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, setting: Any, is_terminal: bool, expected: str
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    assert logs.resolve_format(setting) == expected
