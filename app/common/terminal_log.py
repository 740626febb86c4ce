"""Log lines for a person at a terminal: local time, words instead of fields, color where the terminal has it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

REQUEST = "inkstream.request"
"""Logger of the request log: one line for each request, with its facts in `fields`."""
START = "inkstream.start"
"""Logger of the steps of a start, which a terminal shows as one summary instead (app/start_summary.py)."""

_COLORS = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}


def paint(text: str, color: str, *, enabled: bool) -> str:
    """The text in a color or weight: red, green, yellow, bold or dim; unchanged unless `enabled`."""
    return f"\x1b[{_COLORS[color]}m{text}\x1b[0m" if enabled else text


def has_color() -> bool:
    """Whether stderr may be colored: a terminal that knows colors, and no NO_COLOR (no-color.org)."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in ("", "dumb")


def terminal_line(record: logging.LogRecord, message: str, *, color: bool) -> str:
    """The line of a record. Everything in it is printable."""
    at = paint(time.strftime("%H:%M:%S", time.localtime(record.created)), "dim", enabled=color)
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    if record.name == REQUEST and "status" in fields:
        return f"{at}  {_request(fields, color=color)}"
    known = [f"{name}={value}" for name, value in fields.items() if value is not None]
    text = " ".join(_printable(part) for part in (message, *known))
    if record.levelno >= logging.ERROR:
        return f"{at}  {paint('error:', 'red', enabled=color)} {text}"
    if record.levelno >= logging.WARNING:
        return f"{at}  {paint('warning:', 'yellow', enabled=color)} {text}"
    return f"{at}  {text}"


def _request(fields: Mapping[str, Any], *, color: bool) -> str:
    """Status, route, tokens, speed, time, and how it ended; the id and the key where they help."""
    status, outcome = fields["status"], str(fields["outcome"])
    failed = status >= 400 or outcome in ("disconnected", "error", "server_error")
    mood = "red" if status >= 500 or outcome in ("error", "server_error") else "yellow" if failed else "green"
    route = f"{fields['method'] or '-'} {fields['route'] or '(no route)'}"
    speed = fields.get("tokens_per_second")
    tokens = fields.get("completion_tokens")
    facts = [
        "" if tokens is None else f"{tokens:,} token{'s' * (tokens != 1)}",
        f"{speed:,.0f} tokens/s" if speed else "",
        _seconds(fields["duration_ms"]),
        "" if outcome == "ok" else paint(outcome, mood, enabled=color and failed),
        f"stream {fields['stream']}" if fields.get("stream") else "",
        f"key {fields['key']}" if fields["key"] else "",
        paint(str(fields["request_id"]), "dim", enabled=color) if failed else "",
    ]
    return f"{paint(str(status), mood, enabled=color)}  {route:<20}  {', '.join(filter(None, facts))}"


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms" if milliseconds < 100 else f"{milliseconds / 1e3:.2f} s"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
