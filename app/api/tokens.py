"""POST /tokenize, POST /detokenize, GET /tokenizer_info and their schemas."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from app.api.completion_fields import Ids
from app.api.dependencies import (
    CallerDep,
    LongTextsDep,
    ServiceDep,
    body_schema,
    read_body,
    version_header,
    while_connected,
)
from app.api.openapi import declared
from app.common.errors import InvalidRequest
from app.common.event_loop import TimeSlice
from app.http.json_stream import Characters, Elements, JsonStream
from model.tokenizer.tokenizer import Tokenizer

_STRICT = ConfigDict(extra="forbid", strict=True)


class TokenizeRequest(BaseModel):
    """Body of POST /tokenize."""

    model_config = _STRICT

    prompt: str = Field(
        description="The text, of any length that a body may have; names of special tokens in it are these tokens.",
        examples=["Once upon a time"],
    )
    add_special_tokens: bool | None = Field(
        None, description="Whether to add what the tokenizer puts around a text (BOS, say), as a prompt gets it (true)."
    )


class DetokenizeRequest(BaseModel):
    """Body of POST /detokenize."""

    model_config = _STRICT

    tokens: Ids = Field(description="Token ids below the size of the vocabulary.", examples=[[1, 2, 3]])


class Piece(BaseModel):
    """A token as it stands in a text. The bytes of all pieces are the text's."""

    id: int = Field(description="Token id.")
    text: str = Field(description="The bytes as UTF-8; parts of a character show as U+FFFD.")
    bytes: list[int] = Field(description="Exactly what the token writes.")
    special: bool = Field(description="A token that steers the model; its name is shown in prompts, never in answers.")


class PlacedPiece(Piece):
    """A token and the characters it was made of."""

    start: int = Field(description="Its first character in the given text, counted in code points.")
    end: int = Field(description="Behind its last character; `start` for a token that was added.")


class TokenizeResponse(BaseModel):
    """Answer of POST /tokenize."""

    count: int = Field(description="Number of tokens.")
    max_model_len: int = Field(description="Tokens that the model can read, prompt and answer together.")
    tokens: list[int] = Field(description="Token ids.")
    pieces: list[PlacedPiece] = Field(description="The same tokens, with text, bytes and place.")


class DetokenizeResponse(BaseModel):
    """Answer of POST /detokenize."""

    prompt: str = Field(description="The text; bytes that are no UTF-8 show as U+FFFD.")
    pieces: list[Piece] = Field(description="The tokens, with text and bytes.")


class SpecialToken(BaseModel):
    """A token that steers the model."""

    id: int = Field(description="Token id.")
    text: str = Field(description="How a prompt names it.")


class TokenizerInfo(BaseModel):
    """Answer of GET /tokenizer_info."""

    model: str = Field(description="The model's name.")
    kind: str = Field(description="What sort of tokenizer this is.", examples=["byte-level BPE"])
    vocab_size: int = Field(description="Every id of the tokenizer is below this.")
    max_model_len: int = Field(description="Tokens that the model can read, prompt and answer together.")
    bos_token: str | None = Field(description="Starts a text.")
    bos_token_id: int | None = Field(description="Its id.")
    add_bos_token: bool = Field(description="Whether it is put before every text.")
    eos_token: str | None = Field(description="Ends a text.")
    eos_token_id: int | None = Field(description="Its id.")
    eos_token_ids: list[int] = Field(description="All tokens that end a text.")
    special_tokens: list[SpecialToken] = Field(description="All tokens that steer the model, by id.")
    chat_template: str | None = Field(description="In the language of Jinja, where the weights bring one.")


_BATCH = 128
_T = TypeVar("_T")
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
    encoder = service.instance.text_encoder()
    prompt, special = body.prompt, body.add_special_tokens is not False

    with ExitStack() as stack:
        account = stack.enter_context(service.admission.count_request(caller))
        slices = encoder.span_slices(prompt, add_special_tokens=special)
        length = encoder.pool_length(len(prompt))
        spans = await while_connected(request, long_texts.run_slices(length, slices, account))
        answer = {
            "count": len(spans),
            "max_model_len": ready.context,
            "tokens": Elements(lambda: _batches(spans.ids())),
            "pieces": Elements(lambda: _batches(_placed(tokenizer, *span) for span in spans)),
        }
        breather = TimeSlice(partial(service.loop_share.pause, account))
        return JsonStream(answer, version_header(ready.weights_version), breather, stack.pop_all().close)


@router.post(
    "/detokenize",
    response_model=DetokenizeResponse,
    openapi_extra=body_schema(DetokenizeRequest),
    responses=declared(400, 401, 413, 415, 429, 503),
)
async def detokenize(request: Request, service: ServiceDep, caller: CallerDep) -> Response:
    """Token ids to the text that they are, from its start; special tokens are named in it."""
    body = await read_body(request, DetokenizeRequest, service.settings.max_body_bytes)
    ready, tokenizer = service.require_ready()
    largest = max(body.tokens, default=0)
    if largest >= ready.vocab_size:
        raise InvalidRequest(
            f"token id {largest} is outside the vocabulary: ids go from 0 to {ready.vocab_size - 1}", "tokens"
        )
    ids = array("H" if largest < 1 << 16 else "I", body.tokens)
    with ExitStack() as stack:
        account = stack.enter_context(service.admission.count_request(caller))
        answer = {
            "prompt": Characters(lambda: _text(tokenizer, ids)),
            "pieces": Elements(lambda: _batches(_piece(tokenizer, token) for token in ids)),
        }
        breather = TimeSlice(partial(service.loop_share.pause, account))
        return JsonStream(answer, version_header(ready.weights_version), breather, stack.pop_all().close)


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


def _placed(tokenizer: Tokenizer, token: int, start: int, end: int) -> dict[str, Any]:
    return {**_piece(tokenizer, token), "start": start, "end": end}


def _batches(items: Iterable[_T]) -> Iterator[list[_T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, _BATCH)):
        yield batch


def _text(tokenizer: Tokenizer, ids: array[int]) -> Iterator[str]:
    """The text of tokens, in parts."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for batch in _batches(tokenizer.iter_with_specials(ids)):
        yield decoder.decode(b"".join(batch))
    yield decoder.decode(b"", final=True)
