"""Queue limits: whether a request fits the model and the queue, checked before it is submitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from app.common.errors import ContextLengthExceeded, InvalidRequest, QueueFull

_SHARE = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds on what may wait."""

    max_requests: int
    max_prompt_tokens: int


class QueueDemand(NamedTuple):
    """Requests of one answer, and the tokens of their prompts."""

    requests: int
    tokens: int


class QueueState(NamedTuple):
    """What waits, in total or of one tenant."""

    requests: int
    tokens: int


def check_ids(ids: list[int], *, context: int, vocab_size: int, field: str) -> None:
    """Raises ContextLengthExceeded for more ids than the context holds, InvalidRequest for an unknown one."""
    if len(ids) > context:
        raise ContextLengthExceeded(len(ids), context, field)
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"token id {token} is outside the vocabulary: ids go from 0 to {vocab_size - 1}", field
            )


def check_queue(
    limits: QueueLimits,
    *,
    line: QueueState,
    own: QueueState | None,
    adding: QueueDemand,
    retry_after: Callable[[], int],
) -> None:
    """Raises QueueFull if the added requests exceed a limit; `own` is what their tenant has in the queue already.

    With API keys (`own`), one tenant may take seven times what is left: seven eighths of the queue if it is alone, and
    less the more tenants there are, so that there is always capacity for the next one.
    Raises InvalidRequest if there are so many requests that they never fit.
    """
    if adding.requests > limits.max_requests:
        raise InvalidRequest(
            f"the request asks for {adding.requests} continuations, this server takes at most {limits.max_requests} "
            "at once: send fewer prompts, or a smaller n",
            "prompt",
        )
    free, free_tokens = limits.max_requests - line.requests, limits.max_prompt_tokens - line.tokens
    if adding.requests > free:
        raise _full(f"{line.requests} requests wait already", retry_after())
    if line.requests and adding.tokens > free_tokens:
        raise _full(f"the queue is full ({line.tokens} prompt tokens wait)", retry_after())
    # A tenant without waiting requests may always queue.
    if own is None or not own.requests:
        return
    if own.requests + adding.requests > _SHARE * free or own.tokens + adding.tokens > _SHARE * free_tokens:
        raise _full(
            f"{own.requests} requests of yours ({own.tokens} prompt tokens) wait already, the rest of the queue is "
            "for others",
            retry_after(),
        )


def _full(why: str, retry_after: int) -> QueueFull:
    return QueueFull(f"{why}: try again in {retry_after} s", retry_after)
