"""Does this request fit, and is there room in the queue? Decided before the engine hears of it. Pure."""

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
    """What waits: of everybody, or of one caller."""

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
    """Raises QueueFull where what is added would break a bound; `own` is what its caller has there already.

    Where callers are told apart (`own`), one may take seven times what is left: seven eighths of a queue alone, and
    the more there are the less each, so that there is room for whoever comes next.
    Raises InvalidRequest where there are so many requests that they never fit.
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
    # Without anything of its own there, a caller may always come.
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
