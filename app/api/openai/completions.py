"""OpenAI-compatible endpoint POST /v1/completions, streaming or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.dependencies import CallerDep, MetricsDep, ServiceDep, body_schema, check_model, read_body
from app.api.openai import responder as shapes
from app.api.openai.responder import NOT_ENDED, PING_SECONDS, Responder, head_of
from app.api.openai.schemas import CompletionsRequest, CompletionsResponse
from app.api.openapi import declared
from app.api.request_handle import CollectedOutput, RequestHandle
from app.generation.request import Finished, TokenDetail
from app.http.sse import quoted

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
        asked = self.job.admitted.wish.logprobs is not None
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
