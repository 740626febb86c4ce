"""Lines of the log as a person at a terminal reads them."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from app.common import logs
from app.common.terminal_log import REQUEST, has_color, terminal_line

COMPLETION: dict[str, Any] = {
    "request_id": "req-1",
    "method": "POST",
    "route": "/complete",
    "status": 200,
    "key": None,
    "outcome": "length",
    "duration_ms": 1234.5,
    "prompt_tokens": 3,
    "completion_tokens": 1200,
    "tokens_per_second": 987.65,
}


def _line(message: str = "request", *, level: int = logging.INFO, color: bool = False, **fields: Any) -> str:
    """Without its time."""
    record = logging.LogRecord(REQUEST if fields else "inkstream", level, "", 0, message, None, None)
    record.fields = fields
    line = terminal_line(record, message, color=color)
    time = r"\x1b\[2m\d\d:\d\d:\d\d\x1b\[0m  " if color else r"\d\d:\d\d:\d\d  "
    assert re.match(time, line)
    return re.sub(time, "", line, count=1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "200  POST /complete        1,200 tokens, 988 tokens/s, 1.23 s, length"),
        ({"key": "alice", "stream": "req-0", "route": "/v1/chat/completions"},
         "200  POST /v1/chat/completions  1,200 tokens, 988 tokens/s, 1.23 s, length, stream req-0, key alice"),
        ({"completion_tokens": 1, "tokens_per_second": None, "duration_ms": 3.14159},
         "200  POST /complete        1 token, 3.1 ms, length"),
        ({"outcome": "disconnected"},
         "200  POST /complete        1,200 tokens, 988 tokens/s, 1.23 s, disconnected, req-1"),
        ({"status": 400, "outcome": "invalid_request_error", "completion_tokens": None, "tokens_per_second": None},
         "400  POST /complete        1.23 s, invalid_request_error, req-1"),
        ({"method": None, "route": None, "status": 408, "outcome": "timeout", "completion_tokens": None,
          "tokens_per_second": None, "duration_ms": 0.0}, "408  - (no route)          0.0 ms, timeout, req-1"),
        ({"method": "GET", "route": "/v1/models", "outcome": "ok", "completion_tokens": None,
          "tokens_per_second": None, "duration_ms": 0.7}, "200  GET /v1/models        0.7 ms"),
    ],
)  # fmt: skip
def test_a_request_is_one_short_line_and_failures_name_its_id(changes: dict[str, Any], expected: str) -> None:
    assert _line(**(COMPLETION | changes)) == expected


@pytest.mark.parametrize(
    ("status", "outcome", "code"), [(200, "stop", 32), (404, "not_found", 33), (500, "engine_failed", 31),
                                    (200, "disconnected", 33), (200, "error", 31)],
)  # fmt: skip
def test_color_tells_success_from_the_clients_and_the_servers_failures(status: int, outcome: str, code: int) -> None:
    line = _line(color=True, **(COMPLETION | {"status": status, "outcome": outcome}))
    assert line.startswith(f"\x1b[{code}m{status}\x1b[0m  POST /complete ")


@pytest.mark.parametrize(
    ("level", "expected"), [(logging.INFO, "x"), (logging.WARNING, "warning: x"), (logging.CRITICAL, "error: x")]
)
def test_other_events_are_their_message(level: int, expected: str) -> None:
    assert _line("x", level=level) == expected


@pytest.mark.parametrize(
    ("is_terminal", "variables", "expected"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": ""}, True),  # no-color.org: set and not empty
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_color_needs_a_terminal_that_has_it_and_no_objection(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, variables: dict[str, str], expected: bool
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert has_color() is expected


@pytest.mark.parametrize(
    ("setting", "is_terminal", "expected"),
    [("auto", True, "terminal"), ("auto", False, "json"), ("text", True, "text"), ("json", True, "json")],
)
def test_only_auto_depends_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, setting: Any, is_terminal: bool, expected: str
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    assert logs.resolve_format(setting) == expected
