"""A native stream that survives the loss of its replica: splices what another replica sends onto what was delivered.

One way for both: the same request with the seed that `start` told goes to a replica, whichever has room, and what the
client has already is checked and left out. So nothing is computed while nobody listens, and no replica keeps anything.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from app.api.resume_store import ReplayBuffer
from app.cluster.messages import ReplicaLost
from app.cluster.response import Frame, FrameReader
from app.cluster.retry import ReplicaAnswer, RetryingRequest
from app.http.errors import ApiError
from app.http.sse import PING

# replica A:  start  "Once "  "upon a"  x (it died)
# client:     start  "Once "  "upon a"
# replica B:  start  "Once upon"  " a time"  done          the same seed: the same text, in other pieces
# client:                         " time"    done          what it has already is checked, and not sent again

_SAME = ("weights_version", "seed", "prompt_tokens", "settings")
_EARLY = ("cancelled", "timeout")
"""Ends that have nothing to do with the text: they may come before all that was told was repeated."""


class Divergence(Exception):
    """The replica that was asked again does not say what the first one has said."""


@dataclass(slots=True)
class _Choice:
    """One continuation. What was said is counted by all replicas together, what was heard by the present one."""

    said: list[str] = field(default_factory=list)
    n_said: int = 0
    """Tokens, where they are told."""
    before: str = ""
    """All that was said before the present replica began."""
    n_before: int = 0
    heard: int = 0
    n_heard: int = 0

    def begin_again(self) -> None:
        self.before, self.n_before = "".join(self.said), self.n_said
        self.said, self.heard, self.n_heard = [self.before], 0, 0

    def news(self, text: str, tokens: list[Any]) -> tuple[str, list[Any]]:
        """What is new of this. Raises Differs."""
        known = self.before[self.heard : self.heard + len(text)]
        if not text.startswith(known):
            raise Divergence
        new, new_tokens = text[len(known) :], tokens[max(0, self.n_before - self.n_heard) :]
        self.heard += len(text)
        self.n_heard += len(tokens)
        self.said.append(new)
        self.n_said += len(new_tokens)
        return new, new_tokens

    @property
    def is_repeated(self) -> bool:
        return self.heard >= len(self.before)


class StreamSplicer:
    """One stream's; its events are numbered anew, for another replica cuts the text elsewhere."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._start: dict[str, Any] | None = None
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)
        self._next_number = 0
        self.is_over = False
        """Whether the last event was `done` or `error`."""

    @property
    def has_text(self) -> bool:
        """Whether anything was said that another replica must repeat."""
        return self._start is not None

    def request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What another replica must be asked for."""
        return dict(body) if self._start is None else {**body, "seed": self._start["seed"]}

    def begin_again(self) -> None:
        """What comes next is from a replica that begins at the beginning."""
        for choice in self._choices.values():
            choice.begin_again()

    def take(self, frame: Frame) -> bytes:
        """What the client gets of it; nothing where it has all of it. Raises Differs."""
        match frame.name:
            case "token":
                return self._token(frame)
            case "start":
                return self._begin(frame)
            case "queue" if self._start is not None:  # to a client it is running
                return PING
            case "done":
                self._check_end(json.loads(frame.data))
                self.is_over = True
            case "error":
                return self.error(json.loads(frame.data))
            case "":
                return frame.data + b"\n\n"
        return self._numbered(frame.name, frame.data)

    def error(self, body: Mapping[str, Any]) -> bytes:
        """The last event of a stream that cannot go on."""
        self.is_over = True
        error = {**body["error"], "request_id": self._request_id}
        return self._numbered("error", json.dumps({"error": error}).encode("ascii"))

    def _begin(self, frame: Frame) -> bytes:
        start = json.loads(frame.data)
        if self._start is None:
            self._start = {**start, "id": self._request_id}
            return self._numbered("start", json.dumps(self._start).encode("ascii"))
        if any(start[name] != self._start[name] for name in _SAME):
            raise Divergence
        return b""

    def _token(self, frame: Frame) -> bytes:
        event = json.loads(frame.data)
        text, tokens = event["text"], event.get("tokens", [])
        new, new_tokens = self._choices[event["index"]].news(text, tokens)
        if len(new) == len(text) and len(new_tokens) == len(tokens):
            return self._numbered("token", frame.data)
        if not new and not new_tokens:
            return b""
        event["text"] = new
        if tokens:
            event["tokens"] = new_tokens
        return self._numbered("token", json.dumps(event).encode("ascii"))

    def _check_end(self, done: Mapping[str, Any]) -> None:
        for choice in done["choices"]:
            if choice["finish_reason"] not in _EARLY and not self._choices[choice["index"]].is_repeated:
                raise Divergence

    def _numbered(self, name: str, data: bytes) -> bytes:
        number, self._next_number = self._next_number, self._next_number + 1
        return f"id: {self._request_id}:{number}\nevent: {name}\ndata: ".encode("ascii") + data + b"\n\n"


_HEARTBEAT_SECONDS = 10.0


class Reader:
    """One connection's hold on a stream; a newer one takes it over."""


class RelayedStream:
    """What a shelf keeps (app/api/resume_store.py): found by its name, and for its owner alone."""

    def __init__(self, asking: RetryingRequest, *, owner: str, journal_bytes: int) -> None:
        self.name = asking.call.request_id
        self.owner = owner
        self.is_finished = False
        self._asking = asking
        self._told = StreamSplicer(self.name)
        self._journal = ReplayBuffer(journal_bytes)
        self._reader: Reader | None = None
        self._is_stopped = False
        self._began = time.monotonic()

    @property
    def current_id(self) -> str:
        """What the replica that has it now, or had it last, calls it."""
        return self._asking.current_id or self.name

    @property
    def next_number(self) -> int:
        """The number of the frame that comes next."""
        return self._journal.next_number

    def keeps(self, number: int) -> bool:
        """Whether the frames from this one on can be given again."""
        return self._journal.first <= number <= self.next_number

    def attach(self) -> Reader:
        """A connection wants the frames."""
        self._reader = Reader()
        return self._reader

    def detach(self, reader: Reader) -> bool:
        """The connection is over; whether it was the one that counts."""
        if reader is not self._reader:
            return False
        self._reader = None
        return True

    def stop(self) -> bool:
        """No other replica goes on with it; False where it has ended already."""
        was_running = not (self.is_finished or self._is_stopped)
        self._is_stopped = True
        return was_running

    def close(self) -> None:
        """Nobody comes back."""
        self._reader = None

    async def again(self) -> ReplicaAnswer | None:
        """For a client that comes back: a replica that has begun; None where nothing is left to say.

        Raises ApiError where none takes it; the stream is kept, and the client may come back once more.
        """
        while not (self.is_finished or self._is_stopped):
            try:
                return await self._again()
            except ReplicaLost:
                self._asking.lost(has_begun=self._told.has_text)
        return None

    def frames(self, reader: Reader, answer: ReplicaAnswer | None, number: int = 0) -> AsyncGenerator[bytes, None]:
        """Frame `number` and all that follow, to exactly one `done` or `error`.

        answer: of the replica that has just begun with it, if one has.
        """
        return with_heartbeat(self._frames(reader, answer, number), _HEARTBEAT_SECONDS)

    async def _frames(self, reader: Reader, answer: ReplicaAnswer | None, number: int) -> AsyncGenerator[bytes, None]:
        try:
            if number < self.next_number:
                yield self._journal.since(number)
            heard = FrameReader()
            while reader is self._reader and not self.is_finished:
                try:
                    if answer is None:
                        self._check_goes_on()
                        answer, heard = await self._again(), FrameReader()
                        self._check_goes_on()
                    if (piece := await answer.next()) is None:
                        raise ReplicaLost  # it has ended without a word
                    sent = self._take(heard, piece) if reader is self._reader else b""
                except ReplicaLost:
                    sent, answer = self._on_loss(reader), None  # one that was lost is closed
                except ApiError as error:
                    sent = self._fail(error.body(self.name)) if reader is self._reader else b""
                if sent:
                    yield sent
        finally:
            if answer:
                await answer.close()

    async def _again(self) -> ReplicaAnswer:
        """A replica has begun at the beginning. Raises ReplicaLost, and ApiError where it refuses."""
        self._told.begin_again()
        wanted = self._told.request(json.loads(self._asking.call.body))
        if wanted.get("deadline_ms") is not None:
            wanted["deadline_ms"] = max(1, wanted["deadline_ms"] - round((time.monotonic() - self._began) * 1e3))
        answer = await self._asking.begin(self._asking.call.with_body(json.dumps(wanted).encode()))
        if answer.head.status == 200 and answer.head.is_event_stream:
            return answer
        raise await answer.refusal()

    def _check_goes_on(self) -> None:
        """Also when a replica has begun: it may have begun behind the question which of them has the stream."""
        if self._is_stopped:
            raise ApiError(503, "the completion was stopped while no replica had it", code="cancelled")

    def _on_loss(self, reader: Reader) -> bytes:
        if reader is not self._reader:  # a newer connection has a replica of its own
            return b""
        try:
            self._asking.lost(has_begun=self._told.has_text)
        except ApiError as error:
            return self._fail(error.body(self.name))
        return b""

    def _take(self, heard: FrameReader, piece: bytes) -> bytes:
        """What the client gets of it."""
        sent = []
        try:
            for frame in heard.feed(piece):
                if words := self._told.take(frame):
                    sent.append(words if words.startswith(b":") else self._journal.append(words))
        except Divergence:
            error = ApiError(
                503, "its replica is gone, and no other one continues this text: send it again", code="replica_lost"
            )
            return b"".join(sent) + self._fail(error.body(self.name))
        self.is_finished = self._told.is_over
        return b"".join(sent)

    def _fail(self, body: Mapping[str, Any]) -> bytes:
        self._asking.counts.failed.inc()
        self.is_finished = True
        return self._journal.append(self._told.error(body))


async def with_heartbeat(frames: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    """The frames, and a comment wherever there is none for so long."""
    async with aclosing(frames):
        while True:
            coming = asyncio.ensure_future(anext(frames, None))
            try:
                while not (await asyncio.wait({coming}, timeout=seconds))[0]:
                    yield PING
                frame = coming.result()
            finally:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
            if frame is None:
                return
            yield frame
