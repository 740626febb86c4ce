"""What POST /v1/completions answers: OpenAI's shapes, and what is added to them. Shapes only."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from app.api.response_schemas import TopToken, Usage


class LegacyLogprobs(BaseModel):
    """Log-probabilities in lists of one length: an entry for each token."""

    tokens: list[str] = Field(description="Text of each token; where that is none, its bytes or its name.")
    token_logprobs: list[float | None] = Field(description="Its log-probability; null for the first of a prompt.")
    top_logprobs: list[dict[str, float | None] | None] = Field(
        description="The most likely tokens in its place, by text; the token itself is always there."
    )
    text_offset: list[int] = Field(description="Where it begins in the text, in code points.")
    top_tokens: list[list[TopToken]] = Field(description="The most likely tokens again, where no two share a name.")


class CompletionsChoice(BaseModel):
    """One continuation, or in a stream a part of one."""

    index: int = Field(description="Which one: that of the prompt, times n, and the continuation's own.")
    text: str = Field(description="What was written; in a stream, what is new.")
    logprobs: LegacyLogprobs | None = Field(description="Where they were asked for.")
    finish_reason: str | None = Field(description="stop, length, timeout or cancelled; in a stream only at the end.")
    stop_reason: str | int | None = Field(description="The stop string or stop token that was met, if any.")


class CompletionsResponse(BaseModel):
    """Answer of POST /v1/completions, and every chunk of its stream."""

    id: str = Field(description="Begins with cmpl-; the same in all chunks.")
    object: Literal["text_completion"] = Field(description="What this is.")
    created: int = Field(description="When the request came, in seconds since 1970.")
    model: str = Field(description="The model's name.")
    system_fingerprint: str = Field(description="The beginning of the SHA-256 of the weights, and the numerics.")
    seed: int = Field(description="What the random numbers came from.")
    choices: list[CompletionsChoice] = Field(description="Empty in the chunk that tells the usage.")
    usage: Usage | None = Field(None, description="In a stream, only where stream_options ask for it.")
    user: str | None = Field(None, description="As it was sent.")
    request_id: str | None = Field(None, description="As it was sent.")
    truncated: bool | None = Field(None, description="True where truncate_prompt_tokens cut a prompt.")
    warnings: list[str] | None = Field(None, description="Fields that were sent and have no effect.")
