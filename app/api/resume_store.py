"""Registry of resumable streams: running ones, and those whose clients disconnected recently."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from itertools import islice
from typing import Protocol

_MAX_LEFT = 256


class ReplayBuffer:
    """The last frames of one stream: as many as fit into `limit` bytes, and always the newest one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._frames: deque[bytes] = deque()
        self.first = 0
        """The number of the oldest frame in the buffer."""
        self._size = 0

    @property
    def next_number(self) -> int:
        """The next frame's number; the first is 0."""
        return self.first + len(self._frames)

    def append(self, frame: bytes) -> bytes:
        """Appends a frame and returns it."""
        self._frames.append(frame)
        self._size += len(frame)
        while self._size > self._limit and len(self._frames) > 1:
            self._size -= len(self._frames.popleft())
            self.first += 1
        return frame

    def since(self, number: int) -> bytes:
        """The frames from this number on, all of which must be in the buffer."""
        return b"".join(islice(self._frames, number - self.first, None))


class KeptStream(Protocol):
    """A stream that ResumeStore can hold."""

    name: str
    owner: str
    is_finished: bool

    def close(self) -> None:
        """Releases the stream, which can no longer be resumed."""
        ...


class ResumeStore:
    """Holds streams by name and owner; closes those whose clients stay disconnected for `seconds`.

    At most 256 streams of disconnected clients are held. Beyond that, the owner with the most of them loses one, fully
    delivered ones first: an owner that abandons many streams cannot evict those of others.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._kept: dict[str, KeptStream] = {}
        self._left: OrderedDict[str, asyncio.TimerHandle] = OrderedDict()

    def put(self, stream: KeptStream) -> None:
        """Registers a new stream."""
        self._kept[stream.name] = stream

    def find(self, name: str, owner: str) -> KeptStream | None:
        """The stream of this name if `owner` owns it."""
        stream = self._kept.get(name)
        return stream if stream and stream.owner == owner else None

    def leave(self, stream: KeptStream) -> None:
        """The client disconnected or has everything: closes the stream after the timeout, or at once if that is 0."""
        if not self.seconds:
            self._drop(stream.name)
            return
        self._left[stream.name] = asyncio.get_running_loop().call_later(self.seconds, self._drop, stream.name)
        if len(self._left) > _MAX_LEFT:
            owners = Counter(self._kept[name].owner for name in self._left)
            ((most, _),) = owners.most_common(1)
            theirs = [name for name in self._left if self._kept[name].owner == most]
            # A client that has received everything is least likely to reconnect.
            self._drop(next((name for name in theirs if self._kept[name].is_finished), theirs[0]))

    def come_back(self, stream: KeptStream) -> None:
        """The client has reconnected: cancels the timeout."""
        if timer := self._left.pop(stream.name, None):
            timer.cancel()

    def clear(self) -> None:
        """Closes all streams."""
        for name in list(self._kept):
            self._drop(name)

    def _drop(self, name: str) -> None:
        if timer := self._left.pop(name, None):
            timer.cancel()
        if stream := self._kept.pop(name, None):
            stream.close()
