"""The tokenizer over HTTP: POST /tokenize, POST /detokenize, GET /tokenizer_info. Knows no completion."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from app.api.dependencies import CallerDep, LongTextsDep, ServiceDep, body_schema, read_body
from app.api.openapi import declared
from app.api.token_schemas import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from app.api.version_header import version_header
from app.engine.errors import InvalidRequest
from model.tokenizer import Tokenizer

_SLICE = 512
_Column = Callable[[slice], list[Any]]
router = APIRouter(tags=["tokens"])


@router.post(
    "/tokenize",
    response_model=TokenizeResponse,
    openapi_extra=body_schema(TokenizeRequest),
    responses=declared(400, 401, 413, 415, 429, 503),
)
async def tokenize(request: Request, service: ServiceDep, long_texts: LongTextsDep, caller: CallerDep) -> Response:
    """Text to token ids, with the text, the bytes and the place of each token."""
    body = await read_body(request, TokenizeRequest, service.settings.max_body_bytes)
    ready, tokenizer = service.require_ready()
    special = body.add_special_tokens is not False
    with service.gate.visit(caller):
        spans = await long_texts.run(
            len(body.prompt), lambda: tokenizer.encode_spans(body.prompt, add_special_tokens=special)
        )

    def tokens(part: slice) -> list[int]:
        return spans.ids[part].tolist()

    def pieces(part: slice) -> list[dict[str, Any]]:
        places = zip(spans.ids[part], spans.starts[part], spans.ends[part], strict=True)
        return [{**_piece(tokenizer, token), "start": start, "end": end} for token, start, end in places]

    count = len(spans.ids)
    head = {"count": count, "max_model_len": ready.context}
    return _answer(ready.weights_version, head, count, {"tokens": tokens, "pieces": pieces})


@router.post(
    "/detokenize",
    response_model=DetokenizeResponse,
    openapi_extra=body_schema(DetokenizeRequest),
    responses=declared(400, 401, 413, 415, 429, 503),
)
async def detokenize(request: Request, service: ServiceDep, long_texts: LongTextsDep, caller: CallerDep) -> Response:
    """Token ids to the text that they are, from its start; special tokens are named in it."""
    body = await read_body(request, DetokenizeRequest, service.settings.max_body_bytes)
    ready, tokenizer = service.require_ready()
    largest = max(body.tokens, default=0)
    if largest >= ready.vocab_size:
        raise InvalidRequest(
            f"token id {largest} is outside the vocabulary: ids go from 0 to {ready.vocab_size - 1}", "tokens"
        )
    with service.gate.visit(caller):
        text = await long_texts.run(len(body.tokens), lambda: tokenizer.written(body.tokens).decode("utf-8", "replace"))

    def pieces(part: slice) -> list[dict[str, Any]]:
        return [_piece(tokenizer, token) for token in body.tokens[part]]

    return _answer(ready.weights_version, {"prompt": text}, len(body.tokens), {"pieces": pieces})


@router.get("/tokenizer_info", response_model=TokenizerInfo, responses=declared(401, 503))
async def tokenizer_info(service: ServiceDep, response: Response) -> dict[str, Any]:
    """What starts and ends a text, and what else a client must know to make prompts by itself."""
    ready, tokenizer = service.require_ready()
    bos, ends = tokenizer.start_id(ready.start_id), tokenizer.end_ids(ready.eos_ids)
    eos = ends[0] if ends else None
    response.headers.update(version_header(ready.weights_version))
    return {
        "model": service.model_name,
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "max_model_len": ready.context,
        "bos_token": None if bos is None else tokenizer.piece(bos),
        "bos_token_id": bos,
        "add_bos_token": tokenizer.adds_bos,
        "eos_token": None if eos is None else tokenizer.piece(eos),
        "eos_token_id": eos,
        "eos_token_ids": list(ends),
        "special_tokens": [{"id": token, "text": text} for token, text in sorted(tokenizer.specials.items())],
        "chat_template": service.chat_template.source if service.chat_template else None,
    }


def _piece(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    name = tokenizer.specials.get(token)
    data = tokenizer.token_bytes(token) if name is None else name.encode()
    return {
        "id": token,
        "text": data.decode("utf-8", "replace"),
        "bytes": list(data),
        "special": name is not None,
    }


def _answer(version: str, head: dict[str, Any], count: int, columns: dict[str, _Column]) -> Response:
    """One JSON object that is written while it is read: the pieces of a long text take a hundred times its memory."""
    return StreamingResponse(
        _written(head, count, columns), media_type="application/json", headers=version_header(version)
    )


async def _written(head: dict[str, Any], count: int, columns: dict[str, _Column]) -> AsyncIterator[bytes]:
    parts = [msgspec.json.encode(head)[:-1]]
    for name, column in columns.items():
        parts.append(f',"{name}":['.encode())
        for start in range(0, count, _SLICE):
            parts += [b"," if start else b"", msgspec.json.encode(column(slice(start, start + _SLICE)))[1:-1]]
            if start + _SLICE < count:
                yield b"".join(parts)
                parts.clear()
                await asyncio.sleep(0)  # others have their turn, also where this reader is never slow
        parts.append(b"]")
    yield b"".join([*parts, b"}"])
