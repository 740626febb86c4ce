"""POST /v1/chat/completions: messages through the weights' own template, then a completion like any other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.chat_schemas import ChatResponse
from app.api.dependencies import ChatTemplateDep, MetricsDep, ServiceDep, body_schema, read_body
from app.api.errors import ApiError, request_id_of
from app.api.job import Collected, Job
from app.api.openai_answer import PING_SECONDS, Answer, check_model, head_of
from app.api.openai_fields import ChatRequest
from app.api.openai_shapes import name_of
from app.api.openapi import declared
from app.choice import Ended, TokenDetail
from model.tokenizer import Tokenizer

router = APIRouter(responses=declared(400, 404, 413, 415, 500, 503, 504))


@router.post("/v1/chat/completions", response_model=ChatResponse, openapi_extra=body_schema(ChatRequest))
async def chat_completions(
    request: Request, service: ServiceDep, metrics: MetricsDep, template: ChatTemplateDep
) -> Response:
    """Answer a chat, where the weights bring a chat template."""
    body = await read_body(request, ChatRequest, service.settings.max_body_bytes)
    check_model(body.model, service)
    service.require_ready()
    if template is None:
        message = "this model has no chat template: send text to POST /v1/completions, or add chat_template.jinja"
        raise ApiError(400, message, code="no_chat_template")
    prompt = await template.render([turn.for_template for turn in body.messages])
    job = await Job.begin(request_id_of(request), body.wish_for(prompt), service, metrics, heartbeat=PING_SECONDS)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    return await _ChatAnswer(job, body, head_of(job, "chatcmpl", kind)).respond(request)


class _ChatAnswer(Answer):
    """Choices with a message, or in a stream with what is new of it."""

    def whole_choice(self, index: int, one: Collected) -> dict[str, Any]:
        message = {"role": "assistant", "content": one.text}
        return {"index": index, "message": message, **self._facts(one.tokens, one.ended)}

    def part_of_choice(
        self, index: int, text: str, tokens: Sequence[TokenDetail], ended: Ended | None
    ) -> dict[str, Any]:
        delta: dict[str, str] = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        if text:
            delta["content"] = text
        return {"index": index, "delta": delta, **self._facts(tokens, ended)}

    def _facts(self, tokens: Sequence[TokenDetail], ended: Ended | None) -> dict[str, Any]:
        asked = self.job.admitted.wish.logprobs is not None and (tokens or ended)
        return {
            "logprobs": {"content": _content(self.job.admitted.tokenizer, tokens)} if asked else None,
            "finish_reason": ended.finish_reason if ended else None,
            "stop_reason": ended.stop_reason if ended else None,
        }


def _content(tokenizer: Tokenizer, tokens: Iterable[TokenDetail]) -> list[dict[str, Any]]:
    return [
        {
            **_token(tokenizer, detail.id, detail.logprob),
            "top_logprobs": [_token(tokenizer, token, logprob) for token, logprob in detail.top],
        }
        for detail in tokens
    ]


def _token(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    return {
        "token": name_of(tokenizer, token),
        "logprob": logprob,
        "bytes": list(tokenizer.token_bytes(token)),
    }
