"""Server-sent events: the writer and the parser of frames."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from msgspec import to_builtins

from app.common.fault_injection import fault

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
}
PING = b": ping\n\n"
quoted = json.encoder.encode_basestring_ascii
"""Encodes a text as a JSON string in ASCII."""
ascii_json = json.JSONEncoder(check_circular=False, default=to_builtins).encode
"""Encodes response models, dicts and lists. ASCII, because some clients treat U+2028 as a line separator."""


def event(name: str, data: Any, event_id: str) -> bytes:
    """One event; `data` is a response model or a dict."""
    fault("api.event", (event_id, data))
    return f"id: {event_id}\nevent: {name}\ndata: {ascii_json(data)}\n\n".encode("ascii")


class Event(NamedTuple):
    """A server-sent event."""

    name: str
    """`message` if the stream names none; empty for a comment, whose lines are the data."""
    data: bytes
    id: str = ""


class EventParser:
    """Incremental parser of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html, 9.2.6).

    Lines end with LF or CRLF, and may be split anywhere between two feeds. `retry` is ignored.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Event]:
        """Adds data; returns the events that are now complete."""
        *blocks, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        return [event for block in blocks if (event := parse_event(block))]


def parse_event(block: bytes) -> Event | None:
    """The event of the lines before an empty line; None if they hold neither data nor a comment."""
    name, event_id, data = "message", "", []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode("ascii")
        elif field == b"id":
            event_id = value.decode("ascii")
    if data:
        return Event(name, b"\n".join(data), event_id)
    comment = block.lstrip(b"\n")  # there may be several empty lines before it
    return Event("", comment) if comment.startswith(b":") else None
