"""What the wire may say: request and response bodies of the native door. Shapes and ranges only."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

_Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_MAX_IDS = 1 << 20


class CompleteRequest(BaseModel):
    """Body of POST /complete. `null` means the default, for every field but the prompt."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    prompt: str | Annotated[list[_TokenId], Field(max_length=_MAX_IDS, fail_fast=True)] = Field(
        description="Text, or token ids. Empty: start from nothing.", examples=["Once upon a time"]
    )
    source: str | Annotated[list[_TokenId], Field(max_length=_MAX_IDS, fail_fast=True)] | None = Field(
        None, description="What the encoder reads, for models that have one; `prompt` may then be left out."
    )
    max_tokens: int | None = Field(
        None, ge=0, lt=2**31, description="Most tokens to generate (128). Clamped to the context."
    )
    temperature: float | None = Field(
        None, ge=0, le=10, description="0 is greedy; higher is wilder. Default: the model's, else 1."
    )
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="Draw from the k most likely tokens; 0 or -1 is off.")
    top_p: float | None = Field(
        None, ge=0, le=1, description="Draw from the fewest tokens that reach this probability; 0 is the best one."
    )
    min_p: float | None = Field(
        None, ge=0, le=1, description="Leave out tokens less likely than this share of the most likely one."
    )
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="Same seed, prompt and settings: same text. Random if absent."
    )
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16, fail_fast=True)] | None = Field(
        None, description="The text ends before the first of these (up to 16 strings of up to 256 characters)."
    )
    ignore_eos: bool | None = Field(None, description="Go on after the end-of-text token (for benchmarks).")
    logprobs: int | None = Field(
        None, ge=0, le=20, description="Report each token's log-probability and this many alternatives."
    )
    stream: bool | None = Field(None, description="Server-sent events (the default) or one JSON object.")

    @model_validator(mode="before")
    @classmethod
    def _answer_from_the_start(cls, body: Any) -> Any:
        if isinstance(body, dict) and "prompt" not in body and body.get("source") is not None:
            return {**body, "prompt": ""}
        return body


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

    index: int
    text: str
    finish_reason: str = Field(description="stop, length or cancelled.")
    stop_reason: str | int | None = Field(description="The stop string that was met, if any.")
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

    weights_version: str
    seed: int
    settings: dict[str, Any]
    prompt_sha256: str
    source_sha256: str | None = None
    version: str


class CompleteResponse(BaseModel):
    """Answer of POST /complete with "stream": false."""

    id: str
    model: str
    choices: list[Choice]
    usage: Usage
    timings: Timings
    receipt: Receipt


class ErrorBody(BaseModel):
    """What went wrong, for people and for programs."""

    message: str = Field(description="What was wrong, what is allowed, what to change.")
    type: str = Field(description="What sort of error this is.", examples=["invalid_request_error"])
    param: str | None = Field(description="The field of the request that is at fault.")
    code: str | None = Field(description="A fixed word for programs, for some errors.")
    request_id: str = Field(description="Names the request in the server's log.")


class ErrorResponse(BaseModel):
    """The shape of every error."""

    error: ErrorBody


class Cancellation(BaseModel):
    """Answer of DELETE /complete/{id}."""

    id: str = Field(description="Of the completion.")
    cancelled: bool = Field(description="Always true; one that is over is not found.")
