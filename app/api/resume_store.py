"""Streams that their clients may come back to: those that run, and those that were left a moment ago. No HTTP."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from itertools import islice
from typing import Protocol

_MAX_LEFT = 256


class ReplayBuffer:
    """The last frames of one stream: as many as fit into `limit` bytes, and always the newest."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._frames: deque[bytes] = deque()
        self.first = 0
        """The number of the oldest frame that is kept."""
        self._size = 0

    @property
    def next_number(self) -> int:
        """The number of the frame that comes next; the first is 0."""
        return self.first + len(self._frames)

    def append(self, frame: bytes) -> bytes:
        """One more frame, which is given back."""
        self._frames.append(frame)
        self._size += len(frame)
        while self._size > self._limit and len(self._frames) > 1:
            self._size -= len(self._frames.popleft())
            self.first += 1
        return frame

    def since(self, number: int) -> bytes:
        """The frames from this one on, which are kept."""
        return b"".join(islice(self._frames, number - self.first, None))


class KeptStream(Protocol):
    """What the shelf needs of a stream."""

    name: str
    owner: str
    is_finished: bool

    def close(self) -> None:
        """Nobody comes back."""
        ...


class ResumeStore:
    """Knows streams by name and owner; closes those whose clients stay away for `seconds`.

    At most 256 are kept for clients that are away. Whoever has left the most makes room, with those first that were
    read to their end: nobody's are lost because somebody else leaves one after the other.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._kept: dict[str, KeptStream] = {}
        self._left: OrderedDict[str, asyncio.TimerHandle] = OrderedDict()

    def put(self, stream: KeptStream) -> None:
        """A stream begins."""
        self._kept[stream.name] = stream

    def find(self, name: str, owner: str) -> KeptStream | None:
        """The stream of that name, for its owner alone."""
        stream = self._kept.get(name)
        return stream if stream and stream.owner == owner else None

    def leave(self, stream: KeptStream) -> None:
        """Its client is gone, or has everything: it is closed after a while, at once where nothing is kept."""
        if not self.seconds:
            self._drop(stream.name)
            return
        self._left[stream.name] = asyncio.get_running_loop().call_later(self.seconds, self._drop, stream.name)
        if len(self._left) > _MAX_LEFT:
            owners = Counter(self._kept[name].owner for name in self._left)
            ((most, _),) = owners.most_common(1)
            theirs = [name for name in self._left if self._kept[name].owner == most]
            # Whoever has read everything is least likely to come back.
            self._drop(next((name for name in theirs if self._kept[name].is_finished), theirs[0]))

    def come_back(self, stream: KeptStream) -> None:
        """Its client is here again."""
        if timer := self._left.pop(stream.name, None):
            timer.cancel()

    def clear(self) -> None:
        """Closes all of them."""
        for name in list(self._kept):
            self._drop(name)

    def _drop(self, name: str) -> None:
        if timer := self._left.pop(name, None):
            timer.cancel()
        if stream := self._kept.pop(name, None):
            stream.close()
