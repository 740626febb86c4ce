"""Open sequences of one response: all that an engine needs to compute them, or to continue them after a crash."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from app.common.errors import EngineError, EngineFailed
from app.common.types import PromptScores, Request, RequestStarted, SampledEvent

Writes = list[tuple[Callable[[bytes], object], bytes]]
"""Writes to sockets, as (function, data), which wait until every response of a report is encoded. A write wakes the
client that reads the socket; it takes the core, and the caches with it, from the responses that are not encoded yet."""


class OpenSequences(ABC):
    """The sequences of one response, by the ids of the engine's requests; owned by the event loop.

    The engine's side adds tokens, scores and failures, then calls flush() once for all reports of one read. It gets
    back what to submit: request() has the tokens so far, and renew() gives the sequences new ids.
    """

    __slots__ = (  # every token touches an instance that the caches have lost: a dict would be further misses
        *("requests", "crash_count", "incidents", "work_seconds", "drafted_tokens", "accepted_tokens", "engine"),
        *("_open", "_generated", "_scored", "_attempts"),
    )

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self.crash_count = 0
        """Consecutive crashes in which a sequence was in flight when it was released."""
        self.incidents: list[tuple[float, str]] = []
        """What interrupted the sequences, with the time in monotonic seconds; for the trace."""
        self.work_seconds = 0.0
        """CPU time of their grammars outside the engine's steps."""
        self.drafted_tokens = self.accepted_tokens = 0
        self.engine: int | None = None
        """Engine that the latest of the requests was sent to."""
        self._open = {request.id: index for index, request in enumerate(requests)}
        self._attempts = 1
        self._generated: list[list[int]] = [list(request.generated) for request in requests]
        self._scored = [request.scored for request in requests]

    @property
    def is_open(self) -> bool:
        """Whether any sequence has not ended in the engine."""
        return bool(self._open)

    @property
    def open_ids(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return list(self._open)

    @property
    def open_requests(self) -> list[Request]:
        """The original requests that have not ended."""
        return [self.requests[index] for index in self._open.values()]

    def request(self, request_id: str) -> Request:
        """An open sequence as a request for an engine that has no state of it."""
        index = self._open[request_id]
        request, generated, scored = self.requests[index], tuple(self._generated[index]), self._scored[index]
        # Once it has generated tokens it needs no leader; before that it still waits for the prompt's scores.
        leader = None if generated or not request.leader else self._current_id(request.leader)
        if (request_id, generated, scored, leader) == (request.id, request.generated, request.scored, request.leader):
            return request
        return replace(request, id=request_id, generated=generated, scored=scored, leader=leader)

    def generated(self, index: int) -> list[int]:
        """A copy of the tokens so far of the sequence at `index`, also after its end."""
        return self._generated[index].copy()

    def progress(self, request_id: str) -> int:
        """Tokens generated and scored so far of an open sequence."""
        index = self._open[request_id]
        return len(self._generated[index]) + self._scored[index]

    def renew(self) -> list[Request]:
        """The open sequences as requests that continue from their last token.

        They get new ids, so that events that the engine sent before it released them are not attributed to them.
        """
        self._attempts += 1
        self._open = {f"{self.requests[index].id}~{self._attempts}": index for index in self._open.values()}
        return [self.request(name) for name in self._open]

    @abstractmethod
    def add_token(self, request_id: str, at: float, event: SampledEvent) -> None:
        """Adds a token, or the end of a sequence without one. Events of an ended sequence are dropped."""

    @abstractmethod
    def add_start(self, at: float, started: RequestStarted) -> None:
        """The engine has started a sequence."""

    @abstractmethod
    def add_scores(self, scores: PromptScores) -> None:
        """Adds log-probabilities of a sequence's prompt."""

    @abstractmethod
    def fail(self, error: EngineError) -> None:
        """Ends all sequences with an error, and tells the reader at once."""

    @abstractmethod
    def flush(self, writes: Writes) -> None:
        """Lets the reader have what was added; adds its writes. Must not raise."""

    def _current_id(self, leader: str) -> str | None:
        return next((name for name, index in self._open.items() if self.requests[index].id == leader), None)


def flush_all(responses: Iterable[OpenSequences]) -> None:
    """Lets the readers of these responses have what was added: first all of them encode, then all is written."""
    encoded: list[tuple[OpenSequences, Writes]] = []
    for response in responses:
        writes: Writes = []
        response.flush(writes)
        if writes:
            encoded.append((response, writes))
    for response, writes in encoded:
        try:
            for write, data in writes:
                write(data)
        except Exception as error:  # concerns this response, not the engine whose report is being delivered
            response.fail(EngineFailed(f"the response cannot be written: {error}"))
