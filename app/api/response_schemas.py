"""Schemas of responses, stream events and errors, and their serializers; completion_fields.py has those of requests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, Field

from app import VERSION
from app.api.completion_fields import GUIDES, SAMPLING
from app.generation.request import Finished, Prompt, TokenDetail, TokenTable
from app.http.json_stream import Elements
from app.serving.service import Admitted
from model.tokenizer.tokenizer import Tokenizer


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


def piece(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> dict[str, Any]:
    """One token."""
    data = tokenizer.token_bytes(token_id)
    return {"id": token_id, "text": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": logprob}


def token(tokenizer: Tokenizer, detail: TokenDetail) -> dict[str, Any]:
    """One token, and the most likely ones in its place."""
    top = [piece(tokenizer, token_id, logprob) for token_id, logprob in detail.top]
    return piece(tokenizer, detail.id, detail.logprob) | {"top": top}


def tokens(tokenizer: Tokenizer, details: Iterable[TokenDetail]) -> list[dict[str, Any]]:
    """Tokens in order."""
    return [token(tokenizer, detail) for detail in details]


def token_elements(tokenizer: Tokenizer, details: TokenTable) -> Elements:
    """tokens(), encoded lazily: a response may hold hundreds of thousands of alternatives."""
    return Elements(lambda: ([token(tokenizer, detail)] for detail in details))


def echoed(body: object) -> dict[str, str]:
    """The client's own `user` and `request_id`, if it sent them."""
    return {name: value for name in ("user", "request_id") if (value := getattr(body, name)) is not None}


def choice(ended: Finished) -> dict[str, Any]:
    """How a choice ended."""
    return {"index": ended.index, "finish_reason": ended.finish_reason, "stop_reason": ended.stop_reason}


def receipt(admitted: Admitted) -> dict[str, Any]:
    """The receipt, which reproduces the text: `settings` and `seed`, sent again with the prompt."""
    wish = admitted.request
    prompts = [prompt_sha256(prompt) for prompt in wish.prompts]
    others = {"source": wish.source, "suffix": wish.suffix}
    return {
        "weights_version": admitted.weights_version,
        "seed": admitted.params.seed,
        "settings": settings(admitted),
        "prompt_sha256": prompts if wish.is_batch else prompts[0],
        **{f"{name}_sha256": prompt_sha256(text) for name, text in others.items() if text is not None},
        "numerics": admitted.numerics,
        "version": VERSION,
    }


def settings(admitted: Admitted) -> dict[str, Any]:
    """The effective settings, under the names of the request's fields."""
    wish, params = admitted.request, admitted.params
    guide = dict([wish.grammar]) if wish.grammar else {}
    return {
        **{name: getattr(params, name) for name in SAMPLING},
        "logit_bias": {str(token_id): bias for token_id, bias in wish.logit_bias},
        "max_tokens": wish.max_tokens,
        "min_tokens": wish.min_tokens,
        "n": wish.n,
        "stop": list(wish.stops),
        "stop_token_ids": list(wish.stop_token_ids),
        "include_stop": wish.include_stop,
        "ignore_eos": wish.ignore_eos,
        "logprobs": wish.logprobs,
        "echo": wish.echo,
        "truncate_prompt_tokens": wish.truncate_prompt_tokens,
        **{name: guide.get(name) for name in GUIDES},
    }


def prompt_sha256(prompt: Prompt) -> str:
    """SHA-256 of the text in UTF-8, or of the ids in decimal with commas."""
    text = prompt if isinstance(prompt, str) else ",".join(map(str, prompt))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
