"""What the engine says about the sequences of one answer, as the event loop sees it. asyncio, no torch, no pipe.

open --last item--> ended        pause: the engine drops what has not ended; client.resume() submits it again
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from app.engine.errors import EngineError
from app.engine.types import PromptScores, Request, Started, TokenEvent


class Cancelled(EngineError):
    """The stream was ended from outside (DELETE /complete/{id})."""


Item = Started | PromptScores | TokenEvent | EngineError


class Arrival(NamedTuple):
    """One item, for one of the stream's sequences."""

    at: float
    """Monotonic seconds, by the clock of the engine's step."""
    choice: int
    """Place of the sequence in the stream."""
    item: Item


class Stream:
    """Owned by the event loop. Closing it early is the only cancellation, and never waits.

    The buffer is bounded by the requests themselves: at most max_tokens events and one end for each.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        drop: Callable[[Sequence[str]], None],
        position: Callable[[str], int | None],
    ) -> None:
        self.requests = tuple(requests)
        self.strikes = 0
        """Crashes in a row that it was in flight in when it was dropped; the client's side."""
        self._drop = drop
        self._position = position
        self._open = {request.id: index for index, request in enumerate(requests)}
        self._begun = False
        self._attempts = 1
        self._generated: list[list[int]] = [list(request.generated) for request in requests]
        self._scored = [request.scored for request in requests]
        self._arrivals: list[Arrival] = []
        self._arrived = asyncio.Event()

    @property
    def queue_position(self) -> int | None:
        """How many requests wait in front of this stream's first; None once one of its own runs, or all ended."""
        return None if self._begun or not self._open else self._position(next(iter(self._open)))

    @property
    def is_open(self) -> bool:
        """Whether the engine owes it anything."""
        return bool(self._open)

    @property
    def open_ids(self) -> list[str]:
        """The requests that have not ended."""
        return list(self._open)

    @property
    def open_requests(self) -> list[Request]:
        """The same as requests, as they were submitted first."""
        return [self.requests[index] for index in self._open.values()]

    async def receive(self) -> list[Arrival]:
        """Everything that has arrived; empty after wake().

        An error, or a TokenEvent with `finish`, is the last item of its sequence.
        """
        await self._arrived.wait()
        self._arrived.clear()
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def wake(self) -> None:
        """Lets receive() return."""
        self._arrived.set()

    def leave(self, index: int) -> None:
        """Nobody needs more of this sequence. Leaving twice, or after its end, is no error."""
        request_id = next((name for name, place in self._open.items() if place == index), None)
        if request_id is not None:
            del self._open[request_id]
            self._drop([request_id])

    def close(self) -> None:
        """Nobody listens any more: the engine drops every sequence that has not ended."""
        names = list(self._open)
        self._open.clear()
        if names:
            self._drop(names)

    def cancel(self) -> None:
        """Ends the stream for its reader, too."""
        names = list(self._open)
        self.fail(Cancelled("the request was cancelled"), 0.0)
        if names:
            self._drop(names)

    def pause(self) -> None:
        """The engine drops every sequence that has not ended; what has arrived stays."""
        if self._open:
            self._drop(list(self._open))

    def renew(self) -> list[Request]:
        """The sequences that have not ended, as requests that go on from where they stand; the client's side.

        They get new ids, so that nothing is taken for theirs that the engine sent before it heard of the pause.
        """
        self._attempts += 1
        self._begun = False
        self._open = {f"{self.requests[index].id}~{self._attempts}": index for index in self._open.values()}
        return [self.request(name) for name in self._open]

    def request(self, request_id: str) -> Request:
        """An open sequence as an engine is told of it that knows nothing of it; the client's side."""
        index = self._open[request_id]
        request, generated = self.requests[index], tuple(self._generated[index])
        if request_id == request.id and (generated, self._scored[index]) == (request.generated, request.scored):
            return request
        return replace(
            request,
            id=request_id,
            generated=generated,
            scored=self._scored[index],
            # What has begun to write needs nobody; what has not still waits for the prompt's scores.
            leader=None if generated else self._name_now(request.leader),
        )

    def progress(self, request_id: str) -> int:
        """Tokens written and scored so far of an open sequence."""
        index = self._open[request_id]
        return len(self._generated[index]) + self._scored[index]

    def push(self, request_id: str, at: float, item: Item) -> None:
        """Hands an item to the reader; the client's side. Items of a sequence that has ended are dropped."""
        index = self._open.get(request_id)
        if index is None:
            return
        if isinstance(item, TokenEvent):  # first, since nearly all are
            if item.token is not None:
                self._generated[index].append(item.token)
            if item.finish:
                del self._open[request_id]
        elif isinstance(item, Started):
            self._begun = True
        elif isinstance(item, PromptScores):
            self._scored[index] = item.start - 1 + len(item.tokens)
        elif isinstance(item, EngineError):
            del self._open[request_id]
        self._arrivals.append(Arrival(at, index, item))
        self._arrived.set()

    def fail(self, error: EngineError, at: float) -> None:
        """Ends every open sequence with an error; the client's side."""
        for request_id in list(self._open):
            self.push(request_id, at, error)

    def _name_now(self, leader: str | None) -> str | None:
        return next((name for name, index in self._open.items() if self.requests[index].id == leader), None)
