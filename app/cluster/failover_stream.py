"""Failover stream: continues a native stream on another replica after its replica is lost or its client reconnects.

Both cases work the same way: the gateway sends the same request, with the seed from `start`, to any replica with
capacity, verifies the part that the client already has, and skips it. So no replica computes or keeps anything for a
disconnected client.

Responses that need no continuation (whole bodies, OpenAI streams) are forwarded as they come.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.resume_store import ReplayBuffer
from app.cluster.messages import Head, ReplicaLost, Whole
from app.cluster.retry import ReplicaAnswer, RetryingRequest
from app.http import sse
from app.http.errors import ApiError
from app.http.sse import PING


@dataclass(frozen=True, slots=True)
class Frame:
    """One event, or a comment, whose name is empty."""

    name: str
    data: bytes
    """One line of JSON, or the comment's line."""


class FrameReader:
    """Incremental parser of one event stream."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Frame]:
        """Adds data; returns the frames that are now complete."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        return [_frame(block) for block in blocks]


def _frame(block: bytes) -> Frame:
    if block.startswith(b":"):
        return Frame("", block)
    fields = dict(line.partition(b": ")[::2] for line in block.split(b"\n"))
    return Frame(fields.get(b"event", b"").decode("ascii"), fields.get(b"data", b""))


class EventStream(sse.EventStreamResponse):
    """Also closes the replica's response, even if the client disconnects before the first byte."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        headers: dict[str, str],
        answer: ReplicaAnswer | None,
    ) -> None:
        super().__init__(frames, close, headers)
        self._generator = frames
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._release()

    async def discard(self) -> None:
        """Closes the response without sending it."""
        self._close()
        await self._release()

    async def _release(self) -> None:
        await self._generator.aclose()
        if self._answer:
            await self._answer.close()


async def let_go(response: Response) -> None:
    """Closes a response that will not be sent."""
    if isinstance(response, EventStream):
        await response.discard()


def best(answers: list[Whole]) -> Response:
    """The best response: that of the replica that has the resource; otherwise all are equivalent."""
    chosen = next((answer for answer in answers if answer.head.status != 404), answers[0])
    return as_it_is(chosen.head, chosen.body)


def as_it_is(head: Head, body: bytes) -> Response:
    """The response unchanged, with repeated headers."""
    response = Response(body, head.status)
    response.raw_headers = list(head.headers)
    return response


def headers_of(head: Head) -> dict[str, str]:
    """A replica's headers, except those of the event stream itself."""
    own = {name.lower() for name in sse.HEADERS}
    found = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
    return {name: value for name, value in found.items() if name not in own}


_PING = b": ping\n"
_END = b"data: [DONE]\n\n"


async def openai_frames(asking: RetryingRequest, answer: ReplicaAnswer) -> AsyncGenerator[bytes, None]:
    """The frames of `answer` or of its replacement, never of both."""
    was_said = False
    try:
        while True:
            try:
                piece = await answer.next()
                if piece is None:
                    raise ReplicaLost  # the response ended without a final frame
                was_said = was_said or bool(piece.replace(_PING, b""))
                yield piece
                if piece.endswith(_END):  # losing the replica now costs nothing
                    return
            except ReplicaLost:
                await answer.close()
                answer = await _another(asking, was_said=was_said)
    except ApiError as error:
        asking.counts.failed.inc()
        yield f"data: {json.dumps(error.body(asking.call.request_id))}\n\n".encode("ascii") + _END
    finally:
        await answer.close()


async def _another(asking: RetryingRequest, *, was_said: bool) -> ReplicaAnswer:
    """Retries on another replica. Raises ApiError if it cannot, for the client."""
    while not was_said:
        asking.lost(has_begun=False)
        try:
            answer = await asking.begin()
            if answer.head.status == 200:
                return answer
            raise await answer.refusal()
        except ReplicaLost:
            continue
    raise ApiError(503, "the replica that wrote this text is gone: send the request again", code="replica_lost")


# replica A:  start  "Once "  "upon a"  x (it died)
# client:     start  "Once "  "upon a"
# replica B:  start  "Once upon"  " a time"  done          the same seed: the same text, in other pieces
# client:                         " time"    done          the delivered part is verified, and not sent again

_SAME = ("weights_version", "seed", "prompt_tokens", "settings")
_EARLY = ("cancelled", "timeout")
"""Finish reasons that do not depend on the text: they may come before the delivered text was repeated."""


class Divergence(Exception):
    """The new replica's output differs from what the first one delivered."""


@dataclass(slots=True)
class _Choice:
    """One continuation. `said` counts what was delivered from all replicas, `heard` what the current one sent."""

    said: list[str] = field(default_factory=list)
    n_said: int = 0
    """Number of tokens, if log-probabilities were requested."""
    before: str = ""
    """Text that was delivered before the current replica started."""
    n_before: int = 0
    heard: int = 0
    n_heard: int = 0

    def begin_again(self) -> None:
        self.before, self.n_before = "".join(self.said), self.n_said
        self.said, self.heard, self.n_heard = [self.before], 0, 0

    def news(self, text: str, tokens: list[Any]) -> tuple[str, list[Any]]:
        """The part that is not yet delivered. Raises Divergence."""
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
    """Splices one stream; renumbers its events, because another replica splits the text differently."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._start: dict[str, Any] | None = None
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)
        self._next_number = 0
        self.is_over = False
        """Whether the last event was `done` or `error`."""

    @property
    def has_text(self) -> bool:
        """Whether any text was delivered, which another replica must repeat."""
        return self._start is not None

    def request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The request body for another replica."""
        return dict(body) if self._start is None else {**body, "seed": self._start["seed"]}

    def begin_again(self) -> None:
        """Prepares for the events of a replica that starts from the beginning."""
        for choice in self._choices.values():
            choice.begin_again()

    def take(self, frame: Frame) -> bytes:
        """The bytes to deliver for this frame; empty if the client has all of it. Raises Divergence."""
        match frame.name:
            case "token":
                return self._token(frame)
            case "start":
                return self._begin(frame)
            case "queue" if self._start is not None:  # the client was told that the request has started
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
        """The final event of a stream that cannot continue."""
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
    """One connection's subscription to a stream; a newer connection replaces it."""


class RelayedStream:
    """A resumable stream across replicas, held in a ResumeStore (app/api/resume_store.py)."""

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
        """The request id on the current or last replica."""
        return self._asking.current_id or self.name

    @property
    def next_number(self) -> int:
        """The next frame's number."""
        return self._journal.next_number

    def keeps(self, number: int) -> bool:
        """Whether all frames from this number on can be replayed."""
        return self._journal.first <= number <= self.next_number

    def attach(self) -> Reader:
        """Subscribes a connection."""
        self._reader = Reader()
        return self._reader

    def detach(self, reader: Reader) -> bool:
        """Unsubscribes a connection; True if it was the current one."""
        if reader is not self._reader:
            return False
        self._reader = None
        return True

    def stop(self) -> bool:
        """Cancels the stream, so that no replica continues it; False if it had already finished."""
        was_running = not (self.is_finished or self._is_stopped)
        self._is_stopped = True
        return was_running

    def close(self) -> None:
        """Releases the stream, which can no longer be resumed."""
        self._reader = None

    async def again(self) -> ReplicaAnswer | None:
        """Starts a replica for a client that reconnected; None if nothing is left to send.

        Raises ApiError if no replica accepts it; the stream is kept, and the client may reconnect again.
        """
        while not (self.is_finished or self._is_stopped):
            try:
                return await self._again()
            except ReplicaLost:
                self._asking.lost(has_begun=self._told.has_text)
        return None

    def frames(self, reader: Reader, answer: ReplicaAnswer | None, number: int = 0) -> AsyncGenerator[bytes, None]:
        """Yields the frames from `number` on, ending with exactly one `done` or `error`.

        answer: the response of a replica that was just started, if any.
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
                        raise ReplicaLost  # the response ended without a final event
                    sent = self._take(heard, piece) if reader is self._reader else b""
                except ReplicaLost:
                    sent, answer = self._on_loss(reader), None  # a lost response is closed
                except ApiError as error:
                    sent = self._fail(error.body(self.name)) if reader is self._reader else b""
                if sent:
                    yield sent
        finally:
            if answer:
                await answer.close()

    async def _again(self) -> ReplicaAnswer:
        """Starts a replica from the beginning. Raises ReplicaLost, and ApiError if the replica refuses."""
        self._told.begin_again()
        wanted = self._told.request(json.loads(self._asking.call.body))
        if wanted.get("deadline_ms") is not None:
            wanted["deadline_ms"] = max(1, wanted["deadline_ms"] - round((time.monotonic() - self._began) * 1e3))
        answer = await self._asking.begin(self._asking.call.with_body(json.dumps(wanted).encode()))
        if answer.head.status == 200 and answer.head.is_event_stream:
            return answer
        raise await answer.refusal()

    def _check_goes_on(self) -> None:
        """Checks for a cancellation, again after a replica has started: the cancel broadcast may have missed it."""
        if self._is_stopped:
            raise ApiError(503, "the completion was stopped while no replica had it", code="cancelled")

    def _on_loss(self, reader: Reader) -> bytes:
        if reader is not self._reader:  # a newer connection has its own replica
            return b""
        try:
            self._asking.lost(has_begun=self._told.has_text)
        except ApiError as error:
            return self._fail(error.body(self.name))
        return b""

    def _take(self, heard: FrameReader, piece: bytes) -> bytes:
        """The bytes to deliver for `piece`."""
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
    """The frames, with a comment whenever there is none for `seconds`."""
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
