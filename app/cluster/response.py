"""What a client gets of a replica's answer: all of it as it is, or events as they come. Decides nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.cluster.messages import Head, Whole
from app.cluster.retry import ReplicaAnswer
from app.http import sse


class EventStream(sse.EventStreamResponse):
    """Lets go of the replica too, also where the client has left before the first byte."""

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
        """In place of a call: nobody will read it."""
        self._close()
        await self._release()

    async def _release(self) -> None:
        await self._generator.aclose()
        if self._answer:
            await self._answer.close()


async def let_go(response: Response) -> None:
    """Nobody will read it."""
    if isinstance(response, EventStream):
        await response.discard()


def best(answers: list[Whole]) -> Response:
    """Of the replica that knows what was asked for; else all say the same."""
    chosen = next((answer for answer in answers if answer.head.status != 404), answers[0])
    return as_it_is(chosen.head, chosen.body)


def as_it_is(head: Head, body: bytes) -> Response:
    """With each header as often as the replica said it."""
    response = Response(body, head.status)
    response.raw_headers = list(head.headers)
    return response


def headers_of(head: Head) -> dict[str, str]:
    """What a replica says beside that it is an event stream."""
    own = {name.lower() for name in sse.HEADERS}
    found = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
    return {name: value for name, value in found.items() if name not in own}
