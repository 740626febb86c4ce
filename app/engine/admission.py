"""Does this request fit, and is there room in the queue? Decided before the engine hears of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.errors import ContextLengthExceeded, InvalidRequest, QueueFull


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds on what may wait."""

    max_requests: int
    max_prompt_tokens: int


def clamp_max_tokens(prompt: list[int], max_tokens: int, *, context: int, vocab_size: int) -> int:
    """How many tokens can follow `prompt`: at most max_tokens, and never beyond the context.

    Raises ContextLengthExceeded for a prompt that is longer than the context, InvalidRequest for an unknown token id.
    """
    if len(prompt) > context:
        raise ContextLengthExceeded(len(prompt), context)
    for token in prompt:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"token id {token} is outside the vocabulary: ids go from 0 to {vocab_size - 1}", "prompt"
            )
    return min(max_tokens, context - len(prompt))


def check_queue(
    limits: QueueLimits, *, waiting: int, waiting_tokens: int, prompt_tokens: int, retry_after: int
) -> None:
    """Raises QueueFull where one more request of `prompt_tokens` would break a bound."""
    if waiting >= limits.max_requests:
        raise QueueFull(f"{waiting} requests wait already: try again in {retry_after} s", retry_after)
    if waiting and waiting_tokens + prompt_tokens > limits.max_prompt_tokens:
        raise QueueFull(
            f"the queue is full ({waiting_tokens} prompt tokens wait): try again in {retry_after} s", retry_after
        )
