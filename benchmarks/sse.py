"""Incremental parser of server-sent events.

The part of the standard that the service uses: `event:` and `data:` lines, comments and other fields passed over, an
empty line ends an event (https://html.spec.whatwg.org/multipage/server-sent-events.html, section 9.2.6). A line may be
cut anywhere between two feeds.
"""

from __future__ import annotations

from typing import NamedTuple


class Event(NamedTuple):
    """A tuple, because thousands are born each second on the machine being measured."""

    name: bytes
    data: bytes


class EventParser:
    """Mutable, owned by one stream."""

    def __init__(self) -> None:
        self._tail = b""
        self._name = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[Event]:
        *lines, self._tail = (self._tail + data).split(b"\n")
        return [event for line in lines if (event := self._take(line.rstrip(b"\r"))) is not None]

    def _take(self, line: bytes) -> Event | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
        elif field == b"event":
            self._name = value.removeprefix(b" ")
        return None

    def _dispatch(self) -> Event | None:
        name, data = self._name, self._data
        self._name, self._data = b"", []
        return Event(name or b"message", b"\n".join(data)) if data else None
