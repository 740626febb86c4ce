"""Schemas of the events of a streamed completion; app/api/native/event_stream.py sends them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from app.api.response_schemas import ErrorResponse, Receipt, Timings, Token, Usage


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
