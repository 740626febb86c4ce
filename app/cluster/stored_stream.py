"""Streams that the gateway keeps for clients that reconnect."""

from __future__ import annotations

from collections.abc import Iterator

from app.api.native.resumable_stream import ReplayBuffer
from app.api.resume_store import ResumeStore

_PIECE_BYTES = 16 << 10


class Subscription:
    """One connection's subscription to a stream; a newer connection replaces it."""


class KeptStream:
    """A stream of numbered frames, whose recent ones can be replayed; one connection at a time reads them."""

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

    def end(self) -> None:
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
