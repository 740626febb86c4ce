"""Forwards a replica's response to the client: whole bodies, server-sent events, OpenAI streams."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.cluster.messages import Head, ReplicaLost, Whole
from app.cluster.retry import ReplicaAnswer, RetryingRequest
from app.http import sse
from app.http.errors import ApiError


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
