"""Schemas of responses, stream events and errors, and their serializers; completion_fields.py has those of requests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, Field

from app import VERSION
from app.api.completion_fields import GRAMMAR_FIELDS, SAMPLING_FIELDS
from app.generation.request import Finished, Prompt, TokenDetail, TokenTable
from app.http.json_stream import LazyArray
from app.serving.service import Admitted
from model.tokenizer.tokenizer import Tokenizer


class TopToken(BaseModel):
    """A candidate token at one position of the text."""

    id: int = Field(description="Token id.")
    text: str = Field(description="The bytes decoded as UTF-8; incomplete characters become U+FFFD.")
    bytes: list[int] = Field(description="Exact bytes of the token; empty for a special token.")
    logprob: float | None = Field(description="Log-probability from the raw logits, before temperature and filters.")


class Token(TopToken):
    """A token of the text and its alternatives."""

    top: list[TopToken] = Field(description="The most likely tokens at this position, as many as requested.")


class Choice(BaseModel):
    """One continuation."""

    index: int = Field(description="Index of the prompt times n, plus the index of the continuation.")
    text: str = Field(description="The generated text; with echo, after the prompt.")
    finish_reason: str = Field(description="stop, length, timeout or cancelled.")
    stop_reason: str | int | None = Field(description="The stop string or stop token that ended the text, if any.")
    tokens: list[Token] | None = Field(description="The tokens of the text, if logprobs was requested.")


class CachedTokens(BaseModel):
    """Details of the prompt tokens."""

    cached_tokens: int = Field(description="Prompt tokens whose keys and values were in the prefix cache.")


class Usage(BaseModel):
    """Token counts of the engine."""

    prompt_tokens: int = Field(description="Number of prompt tokens.")
    completion_tokens: int = Field(
        description="Number of generated tokens, including end-of-text tokens and stops that were cut from the text."
    )
    total_tokens: int = Field(description="Sum of both.")
    prompt_tokens_details: CachedTokens


class Timings(BaseModel):
    """Milliseconds, and tokens per second while decoding."""

    queue_ms: float = Field(description="From the request to its first step.")
    prefill_ms: float = Field(description="From its first step to its first token.")
    first_token_ms: float = Field(description="From the request to its first token.")
    decode_ms: float = Field(description="From its first token to its last.")
    tokens_per_second: float = Field(description="While decoding.")


class Receipt(BaseModel):
    """Everything that determines the text besides the prompt; reproduces it on the same hardware and build."""

    weights_version: str = Field(description="SHA-256 of the weights.")
    seed: int = Field(description="Seed of the random numbers.")
    settings: dict[str, Any] = Field(description="Effective settings, under the names of the request's fields.")
    prompt_sha256: str | list[str] = Field(description="SHA-256 of the prompt; a list if there were several.")
    source_sha256: str | None = Field(None, description="SHA-256 of the source.")
    suffix_sha256: str | None = Field(None, description="SHA-256 of the suffix.")
    numerics: str = Field(description="What computed (torch or native kernels), and in which number format.")
    version: str = Field(description="Version of inkstream.")


class CompleteResponse(BaseModel):
    """Response of POST /complete with "stream": false."""

    id: str = Field(description="Request id.")
    model: str = Field(description="Name of the model.")
    choices: list[Choice] = Field(description="The continuations, by index.")
    usage: Usage
    timings: Timings
    receipt: Receipt
    truncated: bool | None = Field(None, description="True if truncate_prompt_tokens shortened a prompt.")
    user: str | None = Field(None, description="Echo of the request's field.")
    request_id: str | None = Field(None, description="Echo of the request's field.")


class ErrorBody(BaseModel):
    """The error object."""

    message: str = Field(description="What was wrong, what is allowed, what to change.")
    type: str = Field(description="Type of the error.", examples=["invalid_request_error"])
    param: str | None = Field(description="The field of the request that caused the error.")
    code: str | None = Field(description="Error code for programs; some errors have none.")
    request_id: str = Field(description="Request id, which is also in the server's log.")
    prompt_tokens: int | None = Field(None, description="Number of tokens of a prompt that is too long.")
    max_model_len: int | None = Field(None, description="Context length in tokens, if a prompt is too long.")


class ErrorResponse(BaseModel):
    """The common format of all errors."""

    error: ErrorBody


class Cancellation(BaseModel):
    """Response of DELETE /complete/{id}."""

    id: str = Field(description="Id of the completion.")
    cancelled: bool = Field(description="Always true; a completion that has finished gives a 404.")


class StartEvent(BaseModel):
    """`start`: the request has left the queue."""

    id: str = Field(description="Request id; DELETE /complete/{id} cancels the request.")
    model: str = Field(description="Name of the model.")
    weights_version: str = Field(description="SHA-256 of the weights.")
    seed: int = Field(description="Seed of the random numbers; sent again, it gives the same text.")
    prompt_tokens: int = Field(description="Number of prompt tokens.")
    cached_tokens: int = Field(description="Prompt tokens whose keys and values were in the prefix cache.")
    settings: dict[str, Any] = Field(description="Effective settings, under the names of the request's fields.")
    truncated: bool | None = Field(None, description="True if truncate_prompt_tokens shortened a prompt.")
    user: str | None = Field(None, description="Echo of the request's field.")
    request_id: str | None = Field(None, description="Echo of the request's field.")


class QueueEvent(BaseModel):
    """`queue`: the request is still waiting; sent at most once a second."""

    position: int = Field(description="Number of requests ahead of this one.")
    eta_ms: int = Field(description="Estimated time until the request starts.")


class TokenEvent(BaseModel):
    """`token`: new text. The concatenated texts of a choice are its whole text."""

    index: int = Field(description="Index of the choice.")
    text: str = Field(description="New text of this choice; may be empty.")
    tokens: list[Token] | None = Field(None, description="The tokens of this text, if logprobs was requested.")


class ChoiceEnd(BaseModel):
    """How a choice ended."""

    index: int = Field(description="Index of the choice.")
    finish_reason: str = Field(description="stop, length, timeout or cancelled.")
    stop_reason: str | int | None = Field(description="The stop string or stop token that ended the text, if any.")


class DoneEvent(BaseModel):
    """`done`: the last event of a stream that succeeded."""

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
"""Event name -> schema of its data."""


def piece(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> dict[str, Any]:
    """One token."""
    data = tokenizer.token_bytes(token_id)
    return {"id": token_id, "text": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": logprob}


def token(tokenizer: Tokenizer, detail: TokenDetail) -> dict[str, Any]:
    """One token, and the most likely ones at its position."""
    top = [piece(tokenizer, token_id, logprob) for token_id, logprob in detail.top]
    return piece(tokenizer, detail.id, detail.logprob) | {"top": top}


def tokens(tokenizer: Tokenizer, details: Iterable[TokenDetail]) -> list[dict[str, Any]]:
    """Tokens in order."""
    return [token(tokenizer, detail) for detail in details]


def token_elements(tokenizer: Tokenizer, details: TokenTable) -> LazyArray:
    """tokens(), encoded lazily: a response may contain hundreds of thousands of alternatives."""
    return LazyArray(lambda: ([token(tokenizer, detail)] for detail in details))


def echoed_fields(body: object) -> dict[str, str]:
    """The client's own `user` and `request_id`, if it sent them."""
    return {name: value for name in ("user", "request_id") if (value := getattr(body, name)) is not None}


def choice(finished: Finished) -> dict[str, Any]:
    """How a choice ended."""
    return {"index": finished.index, "finish_reason": finished.finish_reason, "stop_reason": finished.stop_reason}


def receipt(admitted: Admitted) -> dict[str, Any]:
    """The receipt: `settings` and `seed`, sent again with the prompt, reproduce the text."""
    request = admitted.request
    prompts = [prompt_sha256(prompt) for prompt in request.prompts]
    hashed_fields = {"source": request.source, "suffix": request.suffix}
    return {
        "weights_version": admitted.weights_version,
        "seed": admitted.params.seed,
        "settings": settings(admitted),
        "prompt_sha256": prompts if request.is_batch else prompts[0],
        **{f"{name}_sha256": prompt_sha256(text) for name, text in hashed_fields.items() if text is not None},
        "numerics": admitted.numerics,
        "version": VERSION,
    }


def settings(admitted: Admitted) -> dict[str, Any]:
    """The effective settings, under the names of the request's fields."""
    request, params = admitted.request, admitted.params
    grammar = dict([request.grammar]) if request.grammar else {}
    return {
        **{name: getattr(params, name) for name in SAMPLING_FIELDS},
        "logit_bias": {str(token_id): bias for token_id, bias in request.logit_bias},
        "max_tokens": request.max_tokens,
        "min_tokens": request.min_tokens,
        "n": request.n,
        "stop": list(request.stops),
        "stop_token_ids": list(request.stop_token_ids),
        "include_stop": request.include_stop,
        "ignore_eos": request.ignore_eos,
        "logprobs": request.logprobs,
        "echo": request.echo,
        "truncate_prompt_tokens": request.truncate_prompt_tokens,
        **{name: grammar.get(name) for name in GRAMMAR_FIELDS},
    }


def prompt_sha256(prompt: Prompt) -> str:
    """SHA-256 of the text in UTF-8, or of the ids in decimal with commas."""
    text = prompt if isinstance(prompt, str) else ",".join(map(str, prompt))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
