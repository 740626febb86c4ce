"""OpenAI-compatible endpoints: POST /v1/completions and /v1/chat/completions, streaming or not.

The model's chat template renders the messages of a chat as a prompt, which is then completed as usual.
"""

from __future__ import annotations

from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.access.worker_turns import WorkAccount
from app.api.dependencies import check_model, metrics_of, read_body, service_of, while_connected
from app.api.openai import schemas
from app.api.openai.request_fields import check_other_fields
from app.api.openai.responder import (
    PING_SECONDS,
    Responder,
    common_fields,
    lazy_legacy_logprobs,
    legacy_logprobs,
    name_of,
)
from app.api.openai.schemas import ChatRequest, CompletionsRequest, OpenAIFields
from app.api.openapi import declared
from app.api.request_handle import RequestHandle
from app.api.route_documentation import documented
from app.chat.template_client import ChatTemplate
from app.common.errors import InvalidRequest
from app.generation.collector import CollectedOutput
from app.generation.request import Delta, Finished, GenerationRequest, TokenDetail
from app.http.auth import tenant_of
from app.http.errors import ApiError
from app.http.json_stream import LazyArray
from app.serving.model_instance import ModelInstance
from model.tokenizer.tokenizer import Tokenizer

_Body = TypeVar("_Body", bound=OpenAIFields)
_STORY = {"prompt": "Once upon a time", "max_tokens": 40}
_EXAMPLES = {"One object": _STORY, "Stream": {**_STORY, "stream": True}, "Alternatives": {**_STORY, "logprobs": 3}}
_CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 40}
_CHAT_EXAMPLES = {"One object": _CHAT, "Stream": {**_CHAT, "stream": True}}
router = APIRouter(responses=declared(400, 401, 404, 413, 415, 429, 500, 503, 504))


@router.post(
    "/v1/completions",
    openapi_extra=documented(schemas.CompletionsResponse, CompletionsRequest, _EXAMPLES, schemas.CompletionsResponse),
)
async def completions(request: Request) -> Response:
    """Continue a prompt, as OpenAI's completions endpoint does."""
    body = await _read(request, CompletionsRequest)
    handle = await _begin(request, body, body.generation_request)
    return await _CompletionsResponder(handle, body, common_fields(handle, "cmpl", "text_completion")).respond(request)


async def _read(request: Request, model: type[_Body]) -> _Body:
    """Reads a body. Raises ApiError 400 for a field that is not honored, 404 for an unknown model, and counts it."""
    body, service = await read_body(request, model), service_of(request)
    try:
        check_model(body.model, service)
        check_other_fields(body.endpoint, body.model_extra or {}, model.model_fields)
    except ApiError:
        metrics_of(request).record_rejected("invalid")
        service.admission.count_refused(tenant_of(request))
        raise
    return body


async def _begin(
    request: Request, body: OpenAIFields, generation_request: GenerationRequest, instance: ModelInstance | None = None
) -> RequestHandle:
    """Admits a request. An error about its constraint names the field in the client's spelling."""
    try:
        return await RequestHandle.begin(request, generation_request, heartbeat=PING_SECONDS, instance=instance)
    except InvalidRequest as error:
        own, fields = generation_request.grammar, body.constraint_fields
        if own and fields and error.param == own[0] != (sent := fields[0]):
            message = str(error).removeprefix(f"{own[0]}: ")
            raise InvalidRequest(f"{sent}: {message}", sent) from None
        raise


class _CompletionsResponder(Responder):
    """Choices with text and log-probabilities in the legacy format; chunks of a stream have the same format."""

    response_type = schemas.CompletionsResponse

    def full_choice(self, index: int, output: CollectedOutput) -> schemas.CompletionsChoice:
        admitted = self.handle.admitted
        wants_logprobs = admitted.request.logprobs is not None
        logprobs = lazy_legacy_logprobs(admitted.tokenizer, output.tokens) if wants_logprobs else None
        wants_ids = admitted.request.returns_token_ids
        ids = self.completion.generated(output.finished.index) if wants_ids else None
        return schemas.CompletionsChoice(index, output.text, logprobs, *_reasons(output.finished), ids)

    def chunk_choice(self, delta: Delta, finished: Finished | None) -> schemas.CompletionsChoice:
        logprobs = legacy_logprobs(self.handle.admitted.tokenizer, delta.tokens) if delta.tokens else None
        ids = list(delta.ids) or None
        return schemas.CompletionsChoice(delta.index, delta.text, logprobs, *_reasons(finished), ids)


@router.post(
    "/v1/chat/completions",
    openapi_extra=documented(schemas.ChatResponse, ChatRequest, _CHAT_EXAMPLES, schemas.ChatChunk),
)
async def chat_completions(request: Request) -> Response:
    """Complete a chat, if the weights have a chat template."""
    service, body = service_of(request), await _read(request, ChatRequest)
    service.require_ready()
    with service.instance.acquired() as instance:
        with service.admission.prepare(tenant_of(request)) as account:
            prompt = await while_connected(request, _render(instance.chat_template, body, account))
        generation_request = body.generation_request_for(prompt)
        handle = await _begin(request, body, generation_request, instance)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    return await _ChatResponder(handle, body, common_fields(handle, "chatcmpl", kind)).respond(request)


async def _render(template: ChatTemplate | None, body: ChatRequest, account: WorkAccount) -> str:
    if template is None:
        message = "this model has no chat template: send text to POST /v1/completions, or add chat_template.jinja"
        raise ApiError(400, message, code="no_chat_template")
    return await template.render(body.template_inputs, account)


class _ChatResponder(Responder):
    """Choices with a message, in a stream with the new part of it."""

    response_type = schemas.ChatResponse
    chunk_type = schemas.ChatChunk

    def full_choice(self, index: int, output: CollectedOutput) -> schemas.ChatChoice:
        admitted = self.handle.admitted
        logprobs = None
        if admitted.request.logprobs is not None:
            content = LazyArray(lambda: ([_chat_token(admitted.tokenizer, detail)] for detail in output.tokens))
            logprobs = schemas.ChatLogprobs(content)
        return schemas.ChatChoice(
            index, schemas.ChatMessage("assistant", output.text), logprobs, *_reasons(output.finished)
        )

    def chunk_choice(self, delta: Delta, finished: Finished | None) -> schemas.ChatChunkChoice:
        message = schemas.ChatMessage(None if delta.index in self.started else "assistant", delta.text or None)
        content = [_chat_token(self.handle.admitted.tokenizer, detail) for detail in delta.tokens]
        logprobs = schemas.ChatLogprobs(content) if content else None
        return schemas.ChatChunkChoice(delta.index, message, logprobs, *_reasons(finished))


def _reasons(finished: Finished | None) -> tuple[str | None, str | int | None]:
    return (finished.finish_reason, finished.stop_reason) if finished else (None, None)


def _chat_token(tokenizer: Tokenizer, detail: TokenDetail) -> schemas.ChatToken:
    top = [schemas.ChatTop(*_chat_fields(tokenizer, token, logprob)) for token, logprob in detail.top]
    return schemas.ChatToken(*_chat_fields(tokenizer, detail.id, detail.logprob or 0.0), top)


def _chat_fields(tokenizer: Tokenizer, token: int, logprob: float) -> tuple[str, float, list[int]]:
    """The fields of schemas.ChatTop."""
    return name_of(tokenizer, token), logprob, list(tokenizer.token_bytes(token))
