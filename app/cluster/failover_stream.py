"""Failover stream: continues a native stream on another replica after its replica is lost or its client reconnects.

Both cases work the same way: the gateway sends the same request, with the seed from `start`, to any replica with
capacity, verifies the part that the client already has, and skips it. Replicas therefore compute and store nothing for
disconnected clients.

Responses that need no continuation (whole bodies, OpenAI streams) are forwarded as they come.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from app.api.resume_store import ResumeStore
from app.cluster.messages import ReplicaLost
from app.cluster.replica_pool import ReplicaResponse
from app.cluster.retry import RetryingRequest, read_error
from app.cluster.stored_stream import KeptStream, Subscription
from app.http.errors import ApiError
from app.http.event_stream_response import EventStreamResponse
from app.http.response_cycle import BodyWriter
from app.http.sse import PING, Event, EventParser, parse_event

_HEARTBEAT_SECONDS = 10.0
_MAX_UNPARSED_BYTES = 1 << 16
"""More of a stream's tokens is parsed: their text, which is kept, is a fraction of them."""


class EventStream(EventStreamResponse):
    """Streams a response, and closes the replica's response even if the client disconnects before the first byte."""

    def __init__(
        self,
        frames: Callable[[BodyWriter | None], AsyncGenerator[bytes, None]],
        close: Callable[[], None],
        headers: dict[str, str],
        response: ReplicaResponse | None,
    ) -> None:
        super().__init__(self._begin, close, headers)
        self._make_frames = frames
        self._generator: AsyncGenerator[bytes, None] | None = None
        self._response = response

    def _begin(self, writer: BodyWriter | None) -> AsyncGenerator[bytes, None]:
        self._generator = self._make_frames(writer)
        return self._generator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._generator:
                await self._generator.aclose()
            if self._response:
                self._response.close()


_PING = b": ping\n"
_END = b"data: [DONE]\n\n"


async def openai_frames(
    request: RetryingRequest, response: ReplicaResponse, writer: BodyWriter | None = None
) -> AsyncGenerator[bytes, None]:
    """The frames of `response` or of its replacement, never a mix of both. Some may be written to `writer`."""
    has_output = False

    def write(chunk: bytes) -> bool:
        if writer is None or not (writer.is_ready and has_output) or chunk.endswith(_END):
            return False
        writer.write(chunk)
        return True

    try:
        while True:
            try:
                response.consume = write
                chunk = await response.next()
                if chunk is None:
                    raise ReplicaLost  # the response ended without a final frame
                has_output = has_output or bool(chunk.replace(_PING, b""))
                yield chunk
                if chunk.endswith(_END):  # losing the replica now costs nothing
                    return
            except ReplicaLost:
                response.close()
                response = await _retry(request, has_output=has_output)
    except ApiError as error:
        request.counts.failed.inc()
        yield f"data: {json.dumps(error.body(request.call.request_id))}\n\n".encode("ascii") + _END
    finally:
        response.close()


async def _retry(request: RetryingRequest, *, has_output: bool) -> ReplicaResponse:
    """Retries on another replica. Raises ApiError if the request cannot be retried."""
    while not has_output:
        request.record_loss(has_started=False)
        try:
            response = await request.send()
            if response.head.status == 200:
                return response
            raise await read_error(response)
        except ReplicaLost:
            continue
    raise ApiError(503, "the replica of this stream was lost: send the request again", code="replica_lost")


# replica A:  start  "Once "  "upon a"  x (it died)
# client:     start  "Once "  "upon a"
# replica B:  start  "Once upon"  " a time"  done          the same seed: the same text, split differently
# client:                         " time"    done          the delivered part is verified, and not sent again

_INVARIANT_FIELDS = ("weights_version", "seed", "prompt_tokens", "settings")
_TEXT_INDEPENDENT = ("cancelled", "timeout")
"""Finish reasons that do not depend on the text: they may come before the replica has repeated the delivered text."""


class Divergence(Exception):
    """The new replica's output differs from what the first one delivered."""


@dataclass(slots=True)
class _Choice:
    """One continuation: what the client got from all replicas, and what the current replica has sent."""

    delivered: list[str] = field(default_factory=list)
    n_delivered_tokens: int = 0
    """0 unless log-probabilities were requested; so are the other numbers of tokens."""
    expected: str = ""
    """Text that was delivered before the current replica started, which the replica has to repeat."""
    n_expected_tokens: int = 0
    received: int = 0
    """Characters from the current replica."""
    n_received_tokens: int = 0

    def restart(self) -> None:
        self.expected, self.n_expected_tokens = "".join(self.delivered), self.n_delivered_tokens
        self.delivered, self.received, self.n_received_tokens = [self.expected], 0, 0

    def splice(self, text: str, tokens: list[Any]) -> tuple[str, list[Any]]:
        """The part that is not yet delivered. Raises Divergence."""
        known = self.expected[self.received : self.received + len(text)]
        if not text.startswith(known):
            raise Divergence
        new, new_tokens = text[len(known) :], tokens[max(0, self.n_expected_tokens - self.n_received_tokens) :]
        self.received += len(text)
        self.n_received_tokens += len(tokens)
        self.delivered.append(new)
        self.n_delivered_tokens += len(new_tokens)
        return new, new_tokens

    @property
    def has_caught_up(self) -> bool:
        return self.received >= len(self.expected)

    @property
    def is_repeating(self) -> bool:
        return not self.has_caught_up or self.n_received_tokens < self.n_expected_tokens


class StreamSplicer:
    """Splices one stream; renumbers its events, because another replica splits the text differently."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._start: dict[str, Any] | None = None
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)
        self._unparsed: list[bytes] = []
        """The data of delivered tokens that `_choices` do not have yet: most streams never need it."""
        self._n_unparsed = 0
        """Their bytes."""
        self._is_repeating = False
        """Whether the replica may have to repeat text that was delivered."""
        self._next_number = 0
        self.is_done = False
        """Whether the last event was `done` or `error`."""

    @property
    def has_started(self) -> bool:
        """Whether the client got `start`; another replica must then produce the same text."""
        return self._start is not None

    def request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The request body for another replica."""
        return dict(body) if self._start is None else {**body, "seed": self._start["seed"]}

    def restart(self) -> None:
        """Prepares for the events of a replica that starts from the beginning."""
        self._parse_delivered()
        for choice in self._choices.values():
            choice.restart()
        self._is_repeating = any(choice.is_repeating for choice in self._choices.values())

    def take(self, block: bytes) -> bytes:
        """The bytes to deliver for the lines of an event; empty if the client has all of it. Raises Divergence."""
        if delivered := self.take_new_token(block):
            return delivered
        event = parse_event(block)
        return self._take_parsed(event) if event else b""

    def take_new_token(self, block: bytes) -> bytes:
        """take() for a token that need not be compared; empty for everything else, and then changes nothing."""
        id_line, separator, data = block.partition(b"\nevent: token\ndata: ")
        is_as_written = separator and id_line.startswith(b"id: ") and b"\n" not in id_line and b"\n" not in data
        if self._is_repeating or not is_as_written:
            return b""
        self._unparsed.append(data)
        self._n_unparsed += len(data)
        if self._n_unparsed > _MAX_UNPARSED_BYTES:
            self._parse_delivered()
        return self._write_event("token", data)

    def _parse_delivered(self) -> None:
        for data in self._unparsed:
            fields = json.loads(data)
            self._choices[fields["index"]].splice(fields["text"], fields.get("tokens", []))
        self._unparsed.clear()
        self._n_unparsed = 0

    def _take_parsed(self, event: Event) -> bytes:
        match event.name:
            case "token":
                return self._splice_token(event)
            case "start":
                return self._splice_start(event)
            case "queue" if self._start is not None:  # the client already got `start`
                return PING
            case "done":
                self._check_end(json.loads(event.data))
                self.is_done = True
                self._unparsed.clear()  # no other replica can have to continue
            case "error":
                return self.error(json.loads(event.data))
            case "":
                return event.data + b"\n\n"
        return self._write_event(event.name, event.data)

    def error(self, body: Mapping[str, Any]) -> bytes:
        """The final event of a stream that cannot continue."""
        self.is_done = True
        error = {**body["error"], "request_id": self._request_id}
        return self._write_event("error", json.dumps({"error": error}).encode("ascii"))

    def _splice_start(self, event: Event) -> bytes:
        start = json.loads(event.data)
        if self._start is None:
            self._start = {**start, "id": self._request_id}
            return self._write_event("start", json.dumps(self._start).encode("ascii"))
        if any(start[name] != self._start[name] for name in _INVARIANT_FIELDS):
            raise Divergence
        return b""

    def _splice_token(self, event: Event) -> bytes:
        fields = json.loads(event.data)
        text, tokens = fields["text"], fields.get("tokens", [])
        self._parse_delivered()
        new, new_tokens = self._choices[fields["index"]].splice(text, tokens)
        self._is_repeating = any(choice.is_repeating for choice in self._choices.values())
        if len(new) == len(text) and len(new_tokens) == len(tokens):
            return self._write_event("token", event.data)
        if not new and not new_tokens:
            return b""
        fields["text"] = new
        if tokens:
            fields["tokens"] = new_tokens
        return self._write_event("token", json.dumps(fields).encode("ascii"))

    def _check_end(self, done: Mapping[str, Any]) -> None:
        for choice in done["choices"]:
            if choice["finish_reason"] not in _TEXT_INDEPENDENT and not self._choices[choice["index"]].has_caught_up:
                raise Divergence

    def _write_event(self, name: str, data: bytes) -> bytes:
        number, self._next_number = self._next_number, self._next_number + 1
        return f"id: {self._request_id}:{number}\nevent: {name}\ndata: ".encode("ascii") + data + b"\n\n"


class FailoverStream(KeptStream):
    """A resumable stream across replicas."""

    def __init__(
        self, request: RetryingRequest, resume_store: ResumeStore, *, owner: str, replay_bytes: int, alias: str = ""
    ) -> None:
        name = request.call.request_id
        super().__init__(resume_store, name=name, owner=owner, replay_bytes=replay_bytes, alias=alias)
        self._request = request
        self._splicer = StreamSplicer(self.name)
        self._is_cancelled = False
        self._started = time.monotonic()
        self._sent_at = 0.0
        """When the client was last sent something, in monotonic seconds."""

    @property
    def current_id(self) -> str:
        """The request id on the current or last replica."""
        return self._request.current_id or self.name

    def cancel(self) -> bool:
        """Cancels the stream, so that no replica continues it; False if it had already finished."""
        was_running = not (self.is_finished or self._is_cancelled)
        self._is_cancelled = True
        return was_running

    async def reconnect(self) -> ReplicaResponse | None:
        """Starts a replica for a client that reconnected; None if nothing is left to send.

        Raises ApiError if no replica accepts it; the stream is kept, and the client may reconnect again.
        """
        while not (self.is_finished or self._is_cancelled):
            try:
                return await self._send_again()
            except ReplicaLost:
                self._request.record_loss(has_started=self._splicer.has_started)
        return None

    async def frames(
        self,
        subscription: Subscription,
        response: ReplicaResponse | None,
        number: int = 0,
        writer: BodyWriter | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Yields the frames from `number` on, ending with exactly one `done` or `error`.

        response: that of a replica that was just started, if any.
        writer: tokens may be written to it.
        """
        parser = EventParser()

        def write(chunk: bytes) -> bool:
            if writer is None or subscription is not self._subscription or not (writer.is_ready and parser.is_empty):
                return False
            if output := self._new_tokens(chunk):
                writer.write(output)
                self._sent_at = time.monotonic()
            return bool(output)

        self._sent_at = time.monotonic()
        try:
            for piece in self._replayed(subscription, number):
                yield piece
            while subscription is self._subscription and not self.is_finished:
                try:
                    if response is None:
                        self._check_cancelled()
                        starting = asyncio.create_task(self._send_again())
                        try:
                            while not (await asyncio.wait({starting}, timeout=_HEARTBEAT_SECONDS))[0]:
                                yield PING
                        except BaseException:  # the client has disconnected
                            await _abandon(starting)
                            raise
                        response, parser = starting.result(), EventParser()
                        self._check_cancelled()
                    response.consume = write
                    if not (chunk := await self._next_part(response)):
                        output = PING
                    else:
                        output = self._splice(parser, chunk) if subscription is self._subscription else b""
                except ReplicaLost:
                    if response:
                        response.close()
                    output, response = self._on_loss(subscription), None
                except ApiError as error:
                    output = self._fail(error.body(self.name)) if subscription is self._subscription else b""
                if output:
                    self._sent_at = time.monotonic()
                    yield output
        finally:
            if response:
                response.close()

    async def _next_part(self, response: ReplicaResponse) -> bytes:
        """The next part of a body; empty once the client was sent nothing for too long. Raises ReplicaLost.

        A replica may hang without closing its connection.
        """
        while (seconds := self._sent_at + _HEARTBEAT_SECONDS - time.monotonic()) > 0:  # tokens were written meanwhile
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    if (part := await response.next()) is None:
                        raise ReplicaLost  # the response ended without a final event
                    return part
        return b""

    async def _send_again(self) -> ReplicaResponse:
        """Starts a replica from the beginning. Raises ReplicaLost, and ApiError if the replica rejects the request."""
        self._splicer.restart()
        body = self._splicer.request(json.loads(self._request.call.body))
        if body.get("deadline_ms") is not None:
            body["deadline_ms"] = max(1, body["deadline_ms"] - round((time.monotonic() - self._started) * 1e3))
        response = await self._request.send(self._request.call.with_body(json.dumps(body).encode()))
        if response.head.status == 200 and response.head.is_event_stream:
            return response
        raise await read_error(response)

    def _check_cancelled(self) -> None:
        """Raises ApiError if cancelled. Also called after a replica has started: the cancel broadcast may miss it."""
        if self._is_cancelled:
            raise ApiError(503, "the completion was cancelled while no replica was running it", code="cancelled")

    def _on_loss(self, subscription: Subscription) -> bytes:
        if subscription is not self._subscription:  # a newer connection has its own replica
            return b""
        try:
            self._request.record_loss(has_started=self._splicer.has_started)
        except ApiError as error:
            return self._fail(error.body(self.name))
        return b""

    def _new_tokens(self, chunk: bytes) -> bytes:
        """The bytes to deliver for a chunk that is one token's whole event, and need not be compared; else nothing."""
        if chunk.find(b"\n\n") != len(chunk) - 2:
            return b""
        data = self._splicer.take_new_token(chunk[:-2])
        return data and self._replay_buffer.append(data)

    def _splice(self, parser: EventParser, chunk: bytes) -> bytes:
        """The bytes to deliver for `chunk`."""
        output = []
        try:
            for block in parser.blocks(chunk):
                if data := self._splicer.take(block):
                    output.append(data if data.startswith(b":") else self._replay_buffer.append(data))
        except Divergence:
            error = ApiError(
                503,
                "the replica was lost, and another one generates a different text: send the request again",
                code="replica_lost",
            )
            return b"".join(output) + self._fail(error.body(self.name))
        self.is_finished = self._splicer.is_done
        return b"".join(output)

    def _fail(self, body: Mapping[str, Any]) -> bytes:
        self._request.counts.failed.inc()
        self.is_finished = True
        return self._replay_buffer.append(self._splicer.error(body))


async def _abandon(starting: asyncio.Task[ReplicaResponse]) -> None:
    """Cancels the start of a replica, or closes its response if there is one already."""
    starting.cancel()
    (result,) = await asyncio.gather(starting, return_exceptions=True)
    if isinstance(result, ReplicaResponse):
        result.close()
