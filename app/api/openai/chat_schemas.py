"""What POST /v1/chat/completions answers: OpenAI's shapes, and what is added to them. Shapes only."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from app.api.response_schemas import Usage


class ChatTop(BaseModel):
    """A candidate in one place of the text."""

    token: str = Field(description="Its text; where that is none, its bytes or its name.")
    logprob: float = Field(description="From the raw logits.")
    bytes: list[int] = Field(description="Its exact bytes.")


class ChatToken(ChatTop):
    """A token of the text."""

    top_logprobs: list[ChatTop] = Field(description="The most likely tokens in its place.")


class ChatLogprobs(BaseModel):
    """Where they were asked for."""

    content: list[ChatToken] = Field(description="One entry for each token.")


class ChatMessage(BaseModel):
    """What the model says; in a stream, what is new of it."""

    role: str | None = Field(None, description="assistant; in a stream only in a choice's first chunk.")
    content: str | None = Field(None, description="The text.")


class ChatChoice(BaseModel):
    """One answer."""

    index: int = Field(description="Which of the n.")
    message: ChatMessage
    logprobs: ChatLogprobs | None = Field(description="Where they were asked for.")
    finish_reason: str | None = Field(description="stop, length, timeout or cancelled.")
    stop_reason: str | int | None = Field(description="The stop string or stop token that was met, if any.")


class ChatResponse(BaseModel):
    """Answer of POST /v1/chat/completions; chunks of its stream have `delta` in place of `message`."""

    id: str = Field(description="Begins with chatcmpl-; the same in all chunks.")
    object: Literal["chat.completion"] = Field(description="What this is; chat.completion.chunk in a stream.")
    created: int = Field(description="When the request came, in seconds since 1970.")
    model: str = Field(description="The model's name.")
    system_fingerprint: str = Field(description="The beginning of the SHA-256 of the weights, and the numerics.")
    seed: int = Field(description="What the random numbers came from.")
    choices: list[ChatChoice] = Field(description="The answers.")
    usage: Usage
    user: str | None = Field(None, description="As it was sent.")
    request_id: str | None = Field(None, description="As it was sent.")
    truncated: bool | None = Field(None, description="True where truncate_prompt_tokens cut the prompt.")
    warnings: list[str] | None = Field(None, description="Fields that were sent and have no effect.")
