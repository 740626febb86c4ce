"""Registry of resumable streams: running ones, and those whose clients disconnected recently."""

from __future__ import annotations

import asyncio
from typing import Protocol

from app.access.owner_shares import OwnerShares

_MAX_DETACHED = 256


class StoredStream(Protocol):
    """What the store knows of a stream."""

    name: str
    alias: str
    """Another name for its owner; empty for none. The last stream keeps it."""
    owner: str
    is_finished: bool

    def end(self) -> None:
        """Releases the stream, which can no longer be resumed."""


class ResumeStore:
    """Holds streams by name and owner; closes those whose clients stay disconnected for `seconds`.

    At most 256 streams of disconnected clients are held. Beyond that, the owner with the most of them loses one, fully
    delivered ones first: an owner that abandons many streams cannot evict other owners' streams.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._streams: dict[str, StoredStream] = {}
        self._by_alias: dict[tuple[str, str], StoredStream] = {}
        """By owner and alias."""
        self._detached: dict[str, asyncio.TimerHandle] = {}
        self._shares = OwnerShares[str](_MAX_DETACHED)
        """The names in `_detached`, in the order of their disconnects."""

    def put(self, stream: StoredStream) -> None:
        """Adds a new stream."""
        self._streams[stream.name] = stream
        if stream.alias:
            self._by_alias[stream.owner, stream.alias] = stream

    def find(self, name: str, owner: str) -> StoredStream | None:
        """The stream of this name or alias if `owner` owns it."""
        stream = self._streams.get(name)
        return stream if stream and stream.owner == owner else self._by_alias.get((owner, name))

    def mark_detached(self, stream: StoredStream) -> None:
        """Closes the stream after the timeout, unless a client attaches again; at once if the timeout is 0."""
        if not self.seconds:
            self._remove(stream.name)
            return
        self._detached[stream.name] = asyncio.get_running_loop().call_later(self.seconds, self._remove, stream.name)
        self._shares.add(stream.owner, stream.name)
        if self._shares.is_exceeded:
            names = self._shares.largest
            # A client that got the whole stream is least likely to reconnect.
            self._remove(next((name for name in names if self._streams[name].is_finished), next(iter(names))))

    def mark_attached(self, stream: StoredStream) -> None:
        """Cancels the timeout, because the client has reconnected."""
        if timer := self._detached.pop(stream.name, None):
            timer.cancel()
            self._shares.discard(stream.owner, stream.name)

    def clear(self) -> None:
        """Closes all streams."""
        for name in list(self._streams):
            self._remove(name)

    def _remove(self, name: str) -> None:
        if stream := self._streams.pop(name, None):
            self.mark_attached(stream)
            if self._by_alias.get((stream.owner, stream.alias)) is stream:
                del self._by_alias[stream.owner, stream.alias]
            stream.end()
