"""POST /score: log-probabilities of given texts under the model, token by token, without generation."""

from __future__ import annotations

import math
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from app.api.dependencies import read_body
from app.api.openapi import declared
from app.api.request_handle import RequestHandle
from app.api.route_documentation import documented
from app.api.schemas import (
    DeadlineMs,
    Echo,
    EchoedName,
    EchoedUser,
    ModelName,
    Prompts,
    RequestBody,
    Token,
    UpTo20,
    Usage,
    WeightsVersion,
    documented_defaults,
    token_array,
)
from app.common.errors import ContextLengthExceeded
from app.generation.collector import CollectedOutput
from app.generation.request import GenerationRequest, prompt_list
from app.http.json_stream import LazyArray
from app.http.response_model import ResponseModel

router = APIRouter(responses=declared(400, 401, 413, 415, 429, 500, 503, 504))


class ScoreRequest(RequestBody):
    """Body of POST /score. An unknown field is an error."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=documented_defaults(logprobs=0))

    prompt: Prompts = Field(
        description="Text, token ids, or a list of either.", examples=["The quick brown fox jumps over the lazy dog."]
    )
    logprobs: UpTo20 | None = Field(None, description="Number of the most likely tokens to report at each position.")
    deadline_ms: DeadlineMs = None
    user: EchoedUser = None
    request_id: EchoedName = None


class Score(ResponseModel):
    """One text."""

    index: Annotated[int, "Index of the prompt."]
    logprob: Annotated[float, "Log-probability of the text after its first token: the sum over its tokens."]
    n_scored: Annotated[int, "Number of tokens in the sum."]
    perplexity: Annotated[float | None, "exp(-logprob / n_scored); null if no token was scored."]
    bits_per_byte: Annotated[float | None, "-logprob / ln 2 / number of bytes of the scored tokens."]
    tokens: Annotated[LazyArray[Token], "The tokens of the text; the first has no logprob, because it has no context."]


class ScoreResponse(ResponseModel):
    """Response of POST /score."""

    id: Annotated[str, "Request id."]
    model: ModelName
    weights_version: WeightsVersion
    scores: Annotated[list[Score], "One score for each prompt."]
    usage: Usage
    user: Echo = None
    request_id: Echo = None


_EXAMPLES = {
    "One text": {"prompt": "The quick brown fox jumps over the lazy dog."},
    "Two texts, alternatives": {"prompt": ["Once upon a time", "Once upon a lime"], "logprobs": 2},
}


@router.post("/score", openapi_extra=documented(ScoreResponse, ScoreRequest, _EXAMPLES))
async def score(request: Request) -> Response:
    """Log-probabilities of the tokens of given texts, from the model's raw logits."""
    body = await read_body(request, ScoreRequest)
    prompts, is_batch = prompt_list(body.prompt)
    generation_request = GenerationRequest(
        prompts=prompts,
        is_batch=is_batch,
        max_tokens=0,
        echo=True,
        logprobs=body.logprobs or 0,
        deadline_ms=body.deadline_ms,
    )
    try:
        handle = await RequestHandle.begin(request, generation_request)
    except ContextLengthExceeded as error:
        tokens, is_least = error.prompt_tokens, error.is_least
        raise ContextLengthExceeded(
            tokens, error.max_model_len, "prompt", is_least=is_least, remedy="score it in parts"
        ) from None
    return await handle.respond(_response(handle, body), request)


async def _response(handle: RequestHandle, body: ScoreRequest) -> ScoreResponse:
    """The response as one object. Raises EngineError."""
    outputs = await handle.collect()
    return ScoreResponse(
        id=handle.name,
        model=handle.admitted.instance.model_name,
        weights_version=handle.admitted.model_version.key,
        scores=[_score(handle, index, output) for index, output in enumerate(outputs)],
        usage=Usage.of(handle.completion),
        user=body.user,
        request_id=body.request_id,
    )


def _score(handle: RequestHandle, index: int, output: CollectedOutput) -> Score:
    tokenizer = handle.admitted.tokenizer
    pairs = zip(output.tokens.ids, output.tokens.logprobs, strict=True)
    scored = [(token, logprob) for token, logprob in pairs if logprob is not None]
    total = math.fsum(logprob for _, logprob in scored)
    n_bytes = sum(len(tokenizer.token_bytes(token)) for token, _ in scored)
    return Score(
        index=index,
        logprob=total,
        n_scored=len(scored),
        perplexity=_exp(-total / len(scored)) if scored else None,
        bits_per_byte=-total / math.log(2) / n_bytes if n_bytes else None,
        tokens=token_array(tokenizer, output.tokens),
    )


def _exp(exponent: float) -> float | None:
    """exp(), or None on overflow: JSON has no infinity."""
    return math.exp(exponent) if exponent < 700 else None
