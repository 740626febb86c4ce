"""What the wire says: bodies of answers and errors. Shapes only; what may be asked for stands in fields.py."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class TopToken(BaseModel):
    """A candidate in one place of the text."""

    id: int
    text: str
    bytes: list[int]
    logprob: float | None


class Token(TopToken):
    """A token of the text and its alternatives."""

    top: list[TopToken]


class Choice(BaseModel):
    """One continuation."""

    index: int
    text: str
    finish_reason: str = Field(description="stop, length, timeout or cancelled.")
    stop_reason: str | int | None = Field(description="The stop string or stop token that was met, if any.")
    tokens: list[Token] | None = Field(description="Where logprobs were asked for.")


class CachedTokens(BaseModel):
    """How much of the prompt was found in the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts of the engine."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Timings(BaseModel):
    """Milliseconds, and tokens per second while decoding."""

    queue_ms: float
    prefill_ms: float
    first_token_ms: float
    decode_ms: float
    tokens_per_second: float


class Receipt(BaseModel):
    """Sent again with the prompt, it gives the same text on the same hardware and build."""

    weights_version: str
    seed: int
    settings: dict[str, Any]
    prompt_sha256: str | list[str]
    source_sha256: str | None = None
    suffix_sha256: str | None = None
    version: str


class CompleteResponse(BaseModel):
    """Answer of POST /complete with "stream": false."""

    id: str
    model: str
    choices: list[Choice]
    usage: Usage
    timings: Timings
    receipt: Receipt
    truncated: bool | None = Field(None, description="True where truncate_prompt_tokens cut a prompt.")
    user: str | None = None
    request_id: str | None = None


class ErrorBody(BaseModel):
    """What went wrong, for people and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None
    request_id: str


class ErrorResponse(BaseModel):
    """The shape of every error."""

    error: ErrorBody


class Cancellation(BaseModel):
    """Answer of DELETE /complete/{id}."""

    id: str
    cancelled: bool
