"""OpenAI-compatible endpoints: POST /v1/completions and /v1/chat/completions, streaming or not.

The model's chat template renders the messages of a chat as a prompt, which is then completed as usual.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from app.access.tenant_queue import WorkAccount
from app.api.dependencies import MetricsDep, ServiceDep, TenantDep, body_schema, check_model, read_body, while_connected
from app.api.openai.responder import (
    PING_SECONDS,
    UNFINISHED_SUFFIX,
    Responder,
    common_fields,
    logprob_elements,
    name_of,
    token_logprobs,
)
from app.api.openai.schemas import ChatRequest, CompletionsRequest, CompletionsResponse
from app.api.openapi import declared
from app.api.request_handle import CollectedOutput, RequestHandle
from app.api.schemas import Usage
from app.chat.template import ChatTemplate
from app.generation.request import Finished, TokenDetail
from app.http.errors import ApiError
from app.http.json_stream import LazyArray
from app.http.sse import quoted
from model.tokenizer.tokenizer import Tokenizer

router = APIRouter(responses=declared(400, 401, 404, 413, 415, 429, 500, 503, 504))


@router.post("/v1/completions", response_model=CompletionsResponse, openapi_extra=body_schema(CompletionsRequest))
async def completions(request: Request, service: ServiceDep, metrics: MetricsDep, tenant: TenantDep) -> Response:
    """Continue a prompt, as OpenAI's completions endpoint does."""
    body = await read_body(request, CompletionsRequest, service.settings.max_body_bytes)
    check_model(body.model, service)
    handle = await RequestHandle.begin(
        request, body.generation_request, service, metrics, tenant, heartbeat=PING_SECONDS
    )
    return await _CompletionsResponder(handle, body, common_fields(handle, "cmpl", "text_completion")).respond(request)


class _CompletionsResponder(Responder):
    """Choices with text and log-probabilities in the legacy format; chunks of a stream have the same format."""

    def full_choice(self, index: int, output: CollectedOutput) -> dict[str, Any]:
        wants_logprobs = self.handle.admitted.request.logprobs is not None
        logprobs = logprob_elements(self.handle.admitted.tokenizer, output.tokens) if wants_logprobs else None
        return self._choice(index, output.text, logprobs, output.finished)

    def chunk_choice(
        self, index: int, text: str, tokens: Sequence[TokenDetail], finished: Finished | None
    ) -> dict[str, Any]:
        logprobs = token_logprobs(self.handle.admitted.tokenizer, tokens) if tokens else None
        return self._choice(index, text, logprobs, finished)

    def encode_text_chunk(self, index: int, text: str) -> str:
        return f'{{"index": {index}, "text": {quoted(text)}, {UNFINISHED_SUFFIX}'

    def _choice(
        self, index: int, text: str, logprobs: Mapping[str, Any] | None, finished: Finished | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finished.finish_reason if finished else None,
            "stop_reason": finished.stop_reason if finished else None,
        }


class ChatTop(BaseModel):
    """A candidate token at one position of the text."""

    token: str = Field(description="Text of the token; if it has none, its bytes or its name.")
    logprob: float = Field(description="Log-probability from the raw logits.")
    bytes: list[int] = Field(description="Exact bytes of the token.")


class ChatToken(ChatTop):
    """A token of the text."""

    top_logprobs: list[ChatTop] = Field(description="The most likely tokens at this position.")


class ChatLogprobs(BaseModel):
    """Log-probabilities, if requested."""

    content: list[ChatToken] = Field(description="One entry for each token.")


class ChatMessage(BaseModel):
    """The model's message; in a stream, its new part."""

    role: str | None = Field(None, description="assistant; in a stream only in a choice's first chunk.")
    content: str | None = Field(None, description="The text.")


class ChatChoice(BaseModel):
    """One choice."""

    index: int = Field(description="Index of the choice.")
    message: ChatMessage
    logprobs: ChatLogprobs | None = Field(description="Log-probabilities, if requested.")
    finish_reason: str | None = Field(description="stop, length, timeout or cancelled.")
    stop_reason: str | int | None = Field(description="The stop string or stop token that ended the text, if any.")


class ChatResponse(BaseModel):
    """Response of POST /v1/chat/completions; chunks of its stream have `delta` in place of `message`."""

    id: str = Field(description="Starts with chatcmpl-; the same in all chunks.")
    object: Literal["chat.completion"] = Field(description="Type of the object; chat.completion.chunk in a stream.")
    created: int = Field(description="When the request arrived, as a Unix time.")
    model: str = Field(description="Name of the model.")
    system_fingerprint: str = Field(description="Prefix of the SHA-256 of the weights, and the numerics.")
    seed: int = Field(description="Seed of the random numbers.")
    choices: list[ChatChoice] = Field(description="The choices.")
    usage: Usage
    user: str | None = Field(None, description="Echo of the request's field.")
    request_id: str | None = Field(None, description="Echo of the request's field.")
    truncated: bool | None = Field(None, description="True if truncate_prompt_tokens shortened the prompt.")
    warnings: list[str] | None = Field(None, description="Fields that were sent and have no effect.")


@router.post("/v1/chat/completions", response_model=ChatResponse, openapi_extra=body_schema(ChatRequest))
async def chat_completions(request: Request, service: ServiceDep, metrics: MetricsDep, tenant: TenantDep) -> Response:
    """Complete a chat, if the weights have a chat template."""
    body = await read_body(request, ChatRequest, service.settings.max_body_bytes)
    check_model(body.model, service)
    service.require_ready()
    with service.instance.acquired() as instance:
        with service.admission.prepare(tenant) as account:
            prompt = await while_connected(request, _render(instance.chat_template, body, account))
        generation_request = body.generation_request_for(prompt)
        handle = await RequestHandle.begin(
            request, generation_request, service, metrics, tenant, heartbeat=PING_SECONDS, instance=instance
        )
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    return await _ChatResponder(handle, body, common_fields(handle, "chatcmpl", kind)).respond(request)


async def _render(template: ChatTemplate | None, body: ChatRequest, account: WorkAccount) -> str:
    if template is None:
        message = "this model has no chat template: send text to POST /v1/completions, or add chat_template.jinja"
        raise ApiError(400, message, code="no_chat_template")
    return await template.render([message.for_template for message in body.messages], account)


class _ChatResponder(Responder):
    """Choices with a message, in a stream with the new part of it."""

    def __init__(self, handle: RequestHandle, body: ChatRequest, head: dict[str, Any]) -> None:
        super().__init__(handle, body, head)
        self._started: set[int] = set()
        """Choices of which a chunk was sent."""

    def full_choice(self, index: int, output: CollectedOutput) -> dict[str, Any]:
        tokenizer = self.handle.admitted.tokenizer
        wants_logprobs = self.handle.admitted.request.logprobs is not None
        content = LazyArray(lambda: ([_token_with_top(tokenizer, detail)] for detail in output.tokens))
        message = {"role": "assistant", "content": output.text}
        return {
            "index": index,
            "message": message,
            **_choice_fields(content if wants_logprobs else None, output.finished),
        }

    def chunk_choice(
        self, index: int, text: str, tokens: Sequence[TokenDetail], finished: Finished | None
    ) -> dict[str, Any]:
        delta: dict[str, str] = {} if index in self._started else {"role": "assistant"}
        self._started.add(index)
        if text:
            delta["content"] = text
        content = [_token_with_top(self.handle.admitted.tokenizer, detail) for detail in tokens]
        return {"index": index, "delta": delta, **_choice_fields(content or None, finished)}

    def encode_text_chunk(self, index: int, text: str) -> str:
        if index not in self._started:
            return json.dumps(self.chunk_choice(index, text, (), None))
        return f'{{"index": {index}, "delta": {{"content": {quoted(text)}}}, {UNFINISHED_SUFFIX}'


def _choice_fields(content: Sequence[Any] | LazyArray | None, finished: Finished | None) -> dict[str, Any]:
    return {
        "logprobs": None if content is None else {"content": content},
        "finish_reason": finished.finish_reason if finished else None,
        "stop_reason": finished.stop_reason if finished else None,
    }


def _token_with_top(tokenizer: Tokenizer, detail: TokenDetail) -> dict[str, Any]:
    top = [_token(tokenizer, token, logprob) for token, logprob in detail.top]
    return {**_token(tokenizer, detail.id, detail.logprob), "top_logprobs": top}


def _token(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    return {
        "token": name_of(tokenizer, token),
        "logprob": logprob,
        "bytes": list(tokenizer.token_bytes(token)),
    }
