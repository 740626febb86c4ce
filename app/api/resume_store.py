"""Registry of resumable streams: running ones, and those whose clients disconnected recently."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from app.access.owner_shares import OwnerShares

_MAX_DETACHED = 256
_PIECE_BYTES = 16 << 10
"""Replayed at once: a connection that does not read holds one piece beyond the server's write buffer, not a copy of
the whole stream."""


class ReplayBuffer:
    """The last frames of one stream: as many as fit into `limit` bytes, and always the newest one."""

    __slots__ = ("_frames", "_limit", "_size", "next_number")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._frames: deque[bytes] = deque()
        self.next_number = 0
        """The next frame's number; the first is 0."""
        self._size = 0

    @property
    def first(self) -> int:
        """The number of the oldest frame in the buffer."""
        return self.next_number - len(self._frames)

    def append(self, frame: bytes) -> bytes:
        """Appends a frame and returns it."""
        self._frames.append(frame)
        self.next_number += 1
        self._size += len(frame)
        while self._size > self._limit and len(self._frames) > 1:
            self._size -= len(self._frames.popleft())
        return frame

    def since(self, number: int, limit: int) -> Sequence[bytes]:
        """The frames from this number on, as many as fit into `limit` bytes and at least one; the buffer has them."""
        frames: list[bytes] = []
        size = 0
        for frame in islice(self._frames, number - self.first, None):
            size += len(frame)
            if frames and size > limit:
                break
            frames.append(frame)
        return frames


class Subscription:
    """One connection's subscription to a stream; a newer connection replaces it."""


class StoredStream:
    """A stream of numbered frames, of which recent ones can be replayed; one connection at a time reads them."""

    def __init__(self, resume_store: ResumeStore, *, name: str, owner: str, replay_bytes: int, alias: str = "") -> None:
        """`alias`: another name for its owner, the X-Request-Id that the caller chose; the last stream keeps it."""
        self.name = name
        self.alias = alias
        self.owner = owner
        self.is_finished = False
        self._resume_store = resume_store
        self._replay_buffer = ReplayBuffer(replay_bytes)
        self._subscription: Subscription | None = None
        resume_store.put(self)

    @property
    def next_number(self) -> int:
        """The next frame's number."""
        return self._replay_buffer.next_number

    def can_replay_from(self, number: int) -> bool:
        """Whether all frames from this number on can be replayed."""
        return self._replay_buffer.first <= number <= self.next_number

    def attach(self) -> Subscription:
        """Subscribes a connection."""
        self._resume_store.mark_attached(self)
        self._subscription = Subscription()
        return self._subscription

    def detach(self, subscription: Subscription) -> None:
        """Unsubscribes a connection; the client may reconnect within the resume timeout."""
        if subscription is self._subscription:
            self._subscription = None
            self._suspend()
            self._resume_store.mark_detached(self)

    def close(self) -> None:
        """Releases the stream, which can no longer be resumed."""
        self._subscription = None

    def _replayed(self, subscription: Subscription, number: int) -> Iterator[bytes]:
        """The stored frames from `number` on in pieces, while the connection is subscribed; none are added."""
        while subscription is self._subscription and number < self.next_number:
            frames = self._replay_buffer.since(number, _PIECE_BYTES)
            number += len(frames)
            yield b"".join(frames)

    def _suspend(self) -> None:
        """Called when no connection reads the stream any more."""


class ResumeStore:
    """Holds streams by name and owner; closes those whose clients stay disconnected for `seconds`.

    At most 256 streams of disconnected clients are held. Beyond that, the owner with the most of them loses one, fully
    delivered ones first: an owner that abandons many streams cannot evict those of others.
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
            stream.close()
