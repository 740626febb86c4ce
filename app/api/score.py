"""POST /score: how likely given texts are to the model, token by token. Generates nothing."""

from __future__ import annotations

import math
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from app.api import response_schemas
from app.api.completion_fields import Name, Prompts, integers
from app.api.dependencies import CallerDep, MetricsDep, ServiceDep, body_schema, read_body
from app.api.openapi import declared
from app.api.request_handle import CollectedOutput, RequestHandle
from app.api.response_schemas import Token, Usage
from app.generation.request import GenerationRequest, prompt_list

router = APIRouter(responses=declared(400, 401, 413, 415, 429, 500, 503, 504))


class ScoreRequest(BaseModel):
    """Body of POST /score. An unknown field is an error."""

    model_config = ConfigDict(strict=True, extra="forbid")

    prompt: Prompts = Field(
        description="Text, token ids, or a list of either.", examples=["The quick brown fox jumps over the lazy dog."]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="This many of the most likely tokens in each place (0)."
    )
    deadline_ms: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="The answer may take so long; at most the server's own limit."
    )
    user: Name | None = Field(None, description="Echoed; up to 64 letters, digits, _ and -.")
    request_id: Name | None = Field(None, description="Echoed; up to 64 letters, digits, _ and -.")
    _integers = integers("logprobs", "deadline_ms")


class Score(BaseModel):
    """One text."""

    index: int = Field(description="Which prompt.")
    logprob: float = Field(description="Of the whole text after its first token: the sum over its tokens.")
    n_scored: int = Field(description="Tokens in the sum.")
    perplexity: float | None = Field(description="exp(-logprob / n_scored); null where nothing was scored.")
    bits_per_byte: float | None = Field(description="-logprob / ln 2, by the bytes of the scored tokens.")
    tokens: list[Token] = Field(description="The first has no logprob: nothing stands before it.")


class ScoreResponse(BaseModel):
    """Answer of POST /score."""

    id: str = Field(description="Of this request.")
    model: str = Field(description="The model's name.")
    weights_version: str = Field(description="SHA-256 of the weights.")
    scores: list[Score] = Field(description="One for each prompt.")
    usage: Usage
    user: str | None = Field(None, description="As it was sent.")
    request_id: str | None = Field(None, description="As it was sent.")


@router.post("/score", response_model=ScoreResponse, openapi_extra=body_schema(ScoreRequest))
async def score(request: Request, service: ServiceDep, metrics: MetricsDep, caller: CallerDep) -> Response:
    """Log-probabilities of the tokens of given texts, from the model's raw logits."""
    body = await read_body(request, ScoreRequest, service.settings.max_body_bytes)
    prompts, is_batch = prompt_list(body.prompt)
    wish = GenerationRequest(
        prompts=prompts,
        is_batch=is_batch,
        max_tokens=0,
        echo=True,
        logprobs=body.logprobs or 0,
        deadline_ms=body.deadline_ms,
    )
    job = await RequestHandle.begin(request, wish, service, metrics, caller)
    return await job.respond(_answer(job, body), request)


async def _answer(job: RequestHandle, body: ScoreRequest) -> dict[str, Any]:
    """The response as one object. Raises EngineError."""
    collected = await job.collect()
    return {
        "id": job.name,
        "model": job.admitted.instance.model_name,
        "weights_version": job.admitted.weights_version,
        "scores": [_score(job, index, one) for index, one in enumerate(collected)],
        "usage": job.completion.usage(),
        **response_schemas.echoed(body),
    }


def _score(job: RequestHandle, index: int, one: CollectedOutput) -> dict[str, Any]:
    tokenizer = job.admitted.tokenizer
    pairs = zip(one.tokens.ids, one.tokens.logprobs, strict=True)
    scored = [(token, logprob) for token, logprob in pairs if logprob is not None]
    total = math.fsum(logprob for _, logprob in scored)
    n_bytes = sum(len(tokenizer.token_bytes(token)) for token, _ in scored)
    return {
        "index": index,
        "logprob": total,
        "n_scored": len(scored),
        "perplexity": _exp(-total / len(scored)) if scored else None,
        "bits_per_byte": -total / math.log(2) / n_bytes if n_bytes else None,
        "tokens": response_schemas.token_elements(tokenizer, one.tokens),
    }


def _exp(exponent: float) -> float | None:
    """exp(), or None on overflow: JSON has no infinity."""
    return math.exp(exponent) if exponent < 700 else None
