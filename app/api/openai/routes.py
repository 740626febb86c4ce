"""OpenAI-compatible endpoints: POST /v1/completions and /v1/chat/completions, streaming or not.

A chat's messages go through the model's chat template; what follows is an ordinary completion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from app.access.tenant_queue import WorkAccount
from app.api.dependencies import CallerDep, MetricsDep, ServiceDep, body_schema, check_model, read_body, while_connected
from app.api.openai import responder as shapes
from app.api.openai.responder import NOT_ENDED, PING_SECONDS, Responder, head_of, name_of
from app.api.openai.schemas import ChatRequest, CompletionsRequest, CompletionsResponse
from app.api.openapi import declared
from app.api.request_handle import CollectedOutput, RequestHandle
from app.api.response_schemas import Usage
from app.chat.template import ChatTemplate
from app.generation.request import Finished, TokenDetail
from app.http.errors import ApiError
from app.http.json_stream import Elements
from app.http.sse import quoted
from model.tokenizer.tokenizer import Tokenizer

router = APIRouter(responses=declared(400, 401, 404, 413, 415, 429, 500, 503, 504))


@router.post("/v1/completions", response_model=CompletionsResponse, openapi_extra=body_schema(CompletionsRequest))
async def completions(request: Request, service: ServiceDep, metrics: MetricsDep, caller: CallerDep) -> Response:
    """Continue a prompt, as OpenAI's completions endpoint does."""
    body = await read_body(request, CompletionsRequest, service.settings.max_body_bytes)
    check_model(body.model, service)
    job = await RequestHandle.begin(request, body.wish, service, metrics, caller, heartbeat=PING_SECONDS)
    return await _TextAnswer(job, body, head_of(job, "cmpl", "text_completion")).respond(request)


class _TextAnswer(Responder):
    """Choices with text and log-probabilities in the legacy format; chunks of a stream have the same format."""

    def whole_choice(self, index: int, one: CollectedOutput) -> dict[str, Any]:
        asked = self.job.admitted.request.logprobs is not None
        logprobs = shapes.logprob_elements(self.job.admitted.tokenizer, one.tokens) if asked else None
        return self._choice(index, one.text, logprobs, one.ended)

    def part_of_choice(
        self, index: int, text: str, tokens: Sequence[TokenDetail], ended: Finished | None
    ) -> dict[str, Any]:
        logprobs = shapes.logprobs(self.job.admitted.tokenizer, tokens) if tokens else None
        return self._choice(index, text, logprobs, ended)

    def text_of_choice(self, index: int, text: str) -> str:
        return f'{{"index": {index}, "text": {quoted(text)}, {NOT_ENDED}'

    def _choice(
        self, index: int, text: str, logprobs: Mapping[str, Any] | None, ended: Finished | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": ended.finish_reason if ended else None,
            "stop_reason": ended.stop_reason if ended else None,
        }


class ChatTop(BaseModel):
    """A candidate in one place of the text."""

    token: str = Field(description="Its text; where that is none, its bytes or its name.")
    logprob: float = Field(description="From the raw logits.")
    bytes: list[int] = Field(description="Its exact bytes.")


class ChatToken(ChatTop):
    """A token of the text."""

    top_logprobs: list[ChatTop] = Field(description="The most likely tokens in its place.")


class ChatLogprobs(BaseModel):
    """Log-probabilities, if requested."""

    content: list[ChatToken] = Field(description="One entry for each token.")


class ChatMessage(BaseModel):
    """The model's message; in a stream, its new part."""

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


@router.post("/v1/chat/completions", response_model=ChatResponse, openapi_extra=body_schema(ChatRequest))
async def chat_completions(request: Request, service: ServiceDep, metrics: MetricsDep, caller: CallerDep) -> Response:
    """Answer a chat, where the weights bring a chat template."""
    body = await read_body(request, ChatRequest, service.settings.max_body_bytes)
    check_model(body.model, service)
    service.require_ready()
    with service.instance.acquired() as served:
        with service.admission.prepare(caller) as account:
            prompt = await while_connected(request, _rendered(served.chat_template, body, account))
        wish = body.wish_for(prompt)
        job = await RequestHandle.begin(request, wish, service, metrics, caller, heartbeat=PING_SECONDS, served=served)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    return await _ChatAnswer(job, body, head_of(job, "chatcmpl", kind)).respond(request)


async def _rendered(template: ChatTemplate | None, body: ChatRequest, account: WorkAccount) -> str:
    if template is None:
        message = "this model has no chat template: send text to POST /v1/completions, or add chat_template.jinja"
        raise ApiError(400, message, code="no_chat_template")
    return await template.render([turn.for_template for turn in body.messages], account)


class _ChatAnswer(Responder):
    """Choices with a message, or in a stream with its new part."""

    def __init__(self, job: RequestHandle, body: ChatRequest, head: dict[str, Any]) -> None:
        super().__init__(job, body, head)
        self._begun: set[int] = set()
        """Choices for which a chunk was sent."""

    def whole_choice(self, index: int, one: CollectedOutput) -> dict[str, Any]:
        tokenizer = self.job.admitted.tokenizer
        asked = self.job.admitted.request.logprobs is not None
        content = Elements(lambda: ([_entry(tokenizer, detail)] for detail in one.tokens))
        message = {"role": "assistant", "content": one.text}
        return {"index": index, "message": message, **_facts(content if asked else None, one.ended)}

    def part_of_choice(
        self, index: int, text: str, tokens: Sequence[TokenDetail], ended: Finished | None
    ) -> dict[str, Any]:
        delta: dict[str, str] = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        if text:
            delta["content"] = text
        content = [_entry(self.job.admitted.tokenizer, detail) for detail in tokens]
        return {"index": index, "delta": delta, **_facts(content or None, ended)}

    def text_of_choice(self, index: int, text: str) -> str:
        if index not in self._begun:
            return json.dumps(self.part_of_choice(index, text, (), None))
        return f'{{"index": {index}, "delta": {{"content": {quoted(text)}}}, {NOT_ENDED}'


def _facts(content: Sequence[Any] | Elements | None, ended: Finished | None) -> dict[str, Any]:
    return {
        "logprobs": None if content is None else {"content": content},
        "finish_reason": ended.finish_reason if ended else None,
        "stop_reason": ended.stop_reason if ended else None,
    }


def _entry(tokenizer: Tokenizer, detail: TokenDetail) -> dict[str, Any]:
    top = [_token(tokenizer, token, logprob) for token, logprob in detail.top]
    return {**_token(tokenizer, detail.id, detail.logprob), "top_logprobs": top}


def _token(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    return {
        "token": name_of(tokenizer, token),
        "logprob": logprob,
        "bytes": list(tokenizer.token_bytes(token)),
    }
