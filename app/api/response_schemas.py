"""Schemas of responses, stream events and errors; completion_fields.py has those of requests."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class TopToken(BaseModel):
    """A candidate in one place of the text."""

    id: int = Field(description="Token id.")
    text: str = Field(description="The bytes as UTF-8; parts of a character show as U+FFFD.")
    bytes: list[int] = Field(description="Exactly what the token writes; nothing for one that steers the model.")
    logprob: float | None = Field(description="The model's own, before temperature and filters.")


class Token(TopToken):
    """A token of the text and its alternatives."""

    top: list[TopToken] = Field(description="The most likely tokens in this place, as many as were asked for.")


class Choice(BaseModel):
    """One continuation."""

    index: int = Field(description="Which one: that of the prompt, times n, and the continuation's own.")
    text: str = Field(description="What was written; behind the prompt, where echo was asked for.")
    finish_reason: str = Field(description="stop, length, timeout or cancelled.")
    stop_reason: str | int | None = Field(description="The stop string or stop token that was met, if any.")
    tokens: list[Token] | None = Field(description="Where logprobs were asked for.")


class CachedTokens(BaseModel):
    """How much of the prompt was found in the prefix cache."""

    cached_tokens: int = Field(description="Prompt tokens that were not computed again.")


class Usage(BaseModel):
    """Token counts of the engine."""

    prompt_tokens: int = Field(description="Tokens that were read.")
    completion_tokens: int = Field(description="Tokens that were generated; the end of the text and cut stops count.")
    total_tokens: int = Field(description="Both together.")
    prompt_tokens_details: CachedTokens


class Timings(BaseModel):
    """Milliseconds, and tokens per second while decoding."""

    queue_ms: float = Field(description="From the request to its first step.")
    prefill_ms: float = Field(description="From its first step to its first token.")
    first_token_ms: float = Field(description="From the request to its first token.")
    decode_ms: float = Field(description="From its first token to its last.")
    tokens_per_second: float = Field(description="While decoding.")


class Receipt(BaseModel):
    """Sent again with the prompt, it gives the same text on the same hardware and build."""

    weights_version: str = Field(description="SHA-256 of the weights.")
    seed: int = Field(description="What the random numbers came from.")
    settings: dict[str, Any] = Field(description="What held, under the names of the request's fields.")
    prompt_sha256: str | list[str] = Field(description="Of the prompt; of each, where there were several.")
    source_sha256: str | None = Field(None, description="Of the source.")
    suffix_sha256: str | None = Field(None, description="Of the suffix.")
    numerics: str = Field(description="What computed (torch or native kernels), and in which number format.")
    version: str = Field(description="Of this service.")


class CompleteResponse(BaseModel):
    """Answer of POST /complete with "stream": false."""

    id: str = Field(description="Of this request.")
    model: str = Field(description="The model's name.")
    choices: list[Choice] = Field(description="The continuations, by index.")
    usage: Usage
    timings: Timings
    receipt: Receipt
    truncated: bool | None = Field(None, description="True where truncate_prompt_tokens cut a prompt.")
    user: str | None = Field(None, description="As it was sent.")
    request_id: str | None = Field(None, description="As it was sent.")


class ErrorBody(BaseModel):
    """What went wrong, for people and for programs."""

    message: str = Field(description="What was wrong, what is allowed, what to change.")
    type: str = Field(description="What sort of error this is.", examples=["invalid_request_error"])
    param: str | None = Field(description="The field of the request that is at fault.")
    code: str | None = Field(description="A fixed word for programs, for some errors.")
    request_id: str = Field(description="Names the request in the server's log.")
    prompt_tokens: int | None = Field(None, description="Of a prompt that is too long.")
    max_model_len: int | None = Field(None, description="Tokens that the model can read, where a prompt is too long.")


class ErrorResponse(BaseModel):
    """The shape of every error."""

    error: ErrorBody


class Cancellation(BaseModel):
    """Answer of DELETE /complete/{id}."""

    id: str = Field(description="Of the completion.")
    cancelled: bool = Field(description="Always true; one that is over is not found.")


class StartEvent(BaseModel):
    """`start`: the request has left the queue."""

    id: str = Field(description="Of this request; DELETE /complete/{id} stops it.")
    model: str = Field(description="The model's name.")
    weights_version: str = Field(description="SHA-256 of the weights.")
    seed: int = Field(description="What the random numbers come from; sent again, it gives the same text.")
    prompt_tokens: int = Field(description="Tokens that are read.")
    cached_tokens: int = Field(description="Prompt tokens that were found in the prefix cache.")
    settings: dict[str, Any] = Field(description="The settings that hold, under the names of the request's fields.")
    truncated: bool | None = Field(None, description="True where truncate_prompt_tokens cut a prompt.")
    user: str | None = Field(None, description="As it was sent.")
    request_id: str | None = Field(None, description="As it was sent.")


class QueueEvent(BaseModel):
    """`queue`: still waiting; at most once a second."""

    position: int = Field(description="How many are before this request.")
    eta_ms: int = Field(description="When its turn may come, as far as can be told.")


class TokenEvent(BaseModel):
    """`token`: more text. The texts of a stream, one behind the other, are the text of the whole answer."""

    index: int = Field(description="Which choice goes on.")
    text: str = Field(description="New text of this choice; may be empty.")
    tokens: list[Token] | None = Field(None, description="The tokens of this text, where logprobs were asked for.")


class ChoiceEnd(BaseModel):
    """How a choice ended."""

    index: int = Field(description="Which choice.")
    finish_reason: str = Field(description="stop, length, timeout or cancelled.")
    stop_reason: str | int | None = Field(description="The stop string or stop token that was met, if any.")


class DoneEvent(BaseModel):
    """`done`: the last event of a stream that came to its end."""

    choices: list[ChoiceEnd] = Field(description="How each choice ended.")
    usage: Usage
    timings: Timings
    receipt: Receipt


class ErrorEvent(ErrorResponse):
    """`error`: the last event of a stream that failed."""


EVENTS: dict[str, type[BaseModel]] = {
    "start": StartEvent,
    "queue": QueueEvent,
    "token": TokenEvent,
    "done": DoneEvent,
    "error": ErrorEvent,
}
"""Name of the event -> its data."""
