"""Does this request fit, and is there room in the queue? Decided before the engine hears of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.errors import ContextLengthExceeded, InvalidRequest, QueueFull


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds on what may wait."""

    max_requests: int
    max_prompt_tokens: int


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
    limits: QueueLimits, *, waiting: int, waiting_tokens: int, adding: int, adding_tokens: int, retry_after: int
) -> None:
    """Raises QueueFull where `adding` requests of `adding_tokens` would break a bound.

    Raises InvalidRequest where there are so many of them that they never fit.
    """
    if adding > limits.max_requests:
        raise InvalidRequest(
            f"the request asks for {adding} continuations, this server takes at most {limits.max_requests} at once: "
            "send fewer prompts, or a smaller n",
            "prompt",
        )
    if waiting + adding > limits.max_requests:
        raise QueueFull(f"{waiting} requests wait already: try again in {retry_after} s", retry_after)
    if waiting and waiting_tokens + adding_tokens > limits.max_prompt_tokens:
        raise QueueFull(
            f"the queue is full ({waiting_tokens} prompt tokens wait): try again in {retry_after} s", retry_after
        )
