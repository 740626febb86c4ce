"""POST /tokenize, POST /detokenize, GET /tokenizer_info and their schemas."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Annotated, TypeVar

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from app.api.dependencies import read_body, service_of, version_header, while_connected
from app.api.openapi import declared
from app.api.route_documentation import documented
from app.api.schemas import ContextLength, ModelName, RequestBody, TokenIds, VocabularySize, documented_defaults
from app.common.errors import InvalidRequest
from app.common.ipc import Ready
from app.common.time_slice import TimeSlice
from app.http.auth import tenant_of
from app.http.json_stream import JsonStream, LazyArray, LazyString
from app.http.response_model import ResponseModel, json_response
from app.serving.model_instance import ModelInstance
from model.tokenizer.tokenizer import Tokenizer

_STRICT = ConfigDict(extra="forbid")


class TokenizeRequest(RequestBody):
    """Body of POST /tokenize."""

    model_config = ConfigDict(**_STRICT, json_schema_extra=documented_defaults(add_special_tokens=True))

    prompt: str = Field(
        description="The text, up to the size limit of the body. Names of special tokens in it become these tokens.",
        examples=["Once upon a time"],
    )
    add_special_tokens: bool | None = Field(
        None, description="Whether to add special tokens such as BOS, as for a prompt."
    )


class DetokenizeRequest(RequestBody):
    """Body of POST /detokenize."""

    model_config = _STRICT

    tokens: TokenIds = Field(description="Token ids below the size of the vocabulary.", examples=[[1, 2, 3]])


class Piece(ResponseModel):
    """A token of a text. The bytes of all pieces, concatenated, are the text's."""

    id: Annotated[int, "Token id."]
    text: Annotated[str, "The bytes decoded as UTF-8; incomplete characters become U+FFFD."]
    bytes: Annotated[list[int], "Exact bytes of the token."]
    special: Annotated[bool, "Whether this is a special token: its name is shown in prompts, never in completions."]


class PlacedPiece(Piece):
    """A token and the range of its characters."""

    start: Annotated[int, "Start of its characters in the text, in code points."]
    end: Annotated[int, "End of its characters in the text (exclusive); equal to `start` for an added token."]


class TokenizeResponse(ResponseModel):
    """Response of POST /tokenize."""

    count: Annotated[int, "Number of tokens."]
    max_model_len: ContextLength
    tokens: Annotated[LazyArray[int], "Token ids."]
    pieces: Annotated[LazyArray[PlacedPiece], "The same tokens, with text, bytes and offsets."]


class DetokenizeResponse(ResponseModel):
    """Response of POST /detokenize."""

    prompt: Annotated[LazyString, "The text; bytes that are not valid UTF-8 become U+FFFD."]
    pieces: Annotated[LazyArray[Piece], "The tokens, with text and bytes."]


class SpecialToken(ResponseModel):
    """A special token."""

    id: Annotated[int, "Token id."]
    text: Annotated[str, "Name of the token in prompts."]


class TokenizerInfo(ResponseModel):
    """Response of GET /tokenizer_info."""

    model: ModelName
    kind: Annotated[str, "Type of the tokenizer.", Field(examples=["byte-level BPE"])]
    vocab_size: VocabularySize
    max_model_len: ContextLength
    bos_token: Annotated[str | None, "Token that starts a text."]
    bos_token_id: Annotated[int | None, "Id of this token."]
    add_bos_token: Annotated[bool, "Whether the tokenizer adds it to every text."]
    eos_token: Annotated[str | None, "Token that ends a text."]
    eos_token_id: Annotated[int | None, "Id of this token."]
    eos_token_ids: Annotated[list[int], "All tokens that end a text."]
    special_tokens: Annotated[list[SpecialToken], "All special tokens, by id."]
    chat_template: Annotated[str | None, "Chat template in Jinja, if the weights have one."]


_BATCH = 128
_T = TypeVar("_T")
router = APIRouter(tags=["tokens"])


@router.post(
    "/tokenize",
    openapi_extra=documented(TokenizeResponse, TokenizeRequest, {"Text": {"prompt": "Once upon a time"}}),
    responses=declared(400, 401, 413, 415, 429, 503),
)
async def tokenize(request: Request) -> Response:
    """Convert text to token ids, with the text, bytes and offsets of each token."""
    service, body = service_of(request), await read_body(request, TokenizeRequest)
    ready, tokenizer = service.require_ready()
    encoder = service.instance.text_encoder()
    prompt, special = body.prompt, body.add_special_tokens is not False

    with ExitStack() as stack:
        account = stack.enter_context(service.admission.count_request(tenant_of(request)))
        slices = encoder.span_slices(prompt, "prompt" if special else "plain")
        length = encoder.pool_length(len(prompt))
        spans = await while_connected(request, service.tokenizer_pool.run_slices(length, slices, account))
        fields = _PieceFields(tokenizer)
        content = TokenizeResponse(
            count=len(spans),
            max_model_len=ready.context,
            tokens=LazyArray(lambda: _batches(spans.ids())),
            pieces=LazyArray(lambda: _batches(PlacedPiece(*fields[token], start, end) for token, start, end in spans)),
        )
        time_slice = TimeSlice(partial(service.loop_share.pause, account))
        return JsonStream(content, version_header(ready.model_version), time_slice, stack.pop_all().close)


@router.post(
    "/detokenize",
    openapi_extra=documented(DetokenizeResponse, DetokenizeRequest, {"Token ids": {"tokens": [1, 2, 3]}}),
    responses=declared(400, 401, 413, 415, 429, 503),
)
async def detokenize(request: Request) -> Response:
    """Convert token ids to text; special tokens appear as their names."""
    service, body = service_of(request), await read_body(request, DetokenizeRequest)
    ready, tokenizer = service.require_ready()
    with ExitStack() as stack:
        account = stack.enter_context(service.admission.count_request(tenant_of(request)))
        largest = max(body.tokens, default=0)
        if largest >= ready.vocab_size:
            raise InvalidRequest(
                f"token id {largest} is outside the vocabulary: ids are from 0 to {ready.vocab_size - 1}", "tokens"
            )
        ids = array("H" if largest < 1 << 16 else "I", body.tokens)
        fields = _PieceFields(tokenizer)
        content = DetokenizeResponse(
            prompt=LazyString(lambda: _decoded_parts(tokenizer, ids)),
            pieces=LazyArray(lambda: _batches(Piece(*fields[token]) for token in ids)),
        )
        time_slice = TimeSlice(partial(service.loop_share.pause, account))
        return JsonStream(content, version_header(ready.model_version), time_slice, stack.pop_all().close)


@router.head("/tokenizer_info", include_in_schema=False)
@router.get("/tokenizer_info", openapi_extra=documented(TokenizerInfo), responses=declared(401, 503))
async def tokenizer_info(request: Request) -> Response:
    """Special tokens, chat template, and what else a client needs to build prompts itself."""
    service = service_of(request)
    ready, tokenizer = service.require_ready()
    instance = service.instance
    if not instance.tokenizer_info:
        instance.tokenizer_info = json_response(_tokenizer_info(instance, ready, tokenizer)).body
    headers = version_header(ready.model_version)
    return Response(instance.tokenizer_info, headers=headers, media_type="application/json")


def _tokenizer_info(instance: ModelInstance, ready: Ready, tokenizer: Tokenizer) -> TokenizerInfo:
    bos, ends = tokenizer.start_id(ready.start_id), tokenizer.end_ids(ready.eos_ids)
    eos = ends[0] if ends else None
    return TokenizerInfo(
        model=instance.model_name,
        kind=tokenizer.kind,
        vocab_size=tokenizer.vocab_size,
        max_model_len=ready.context,
        bos_token=None if bos is None else tokenizer.piece(bos),
        bos_token_id=bos,
        add_bos_token=tokenizer.adds_bos,
        eos_token=None if eos is None else tokenizer.piece(eos),
        eos_token_id=eos,
        eos_token_ids=list(ends),
        special_tokens=[SpecialToken(token, text) for token, text in sorted(tokenizer.specials.items())],
        chat_template=instance.chat_template.source if instance.chat_template else None,
    )


class _PieceFields(dict[int, tuple[int, str, list[int], bool]]):
    """The fields of a Piece by token, made once for each: a long text repeats its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> tuple[int, str, list[int], bool]:
        name = self._tokenizer.specials.get(token)
        data = self._tokenizer.token_bytes(token) if name is None else name.encode()
        self[token] = fields = (token, data.decode("utf-8", "replace"), list(data), name is not None)
        return fields


def _batches(items: Iterable[_T]) -> Iterator[list[_T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, _BATCH)):
        yield batch


def _decoded_parts(tokenizer: Tokenizer, ids: array[int]) -> Iterator[str]:
    """The text of tokens, in parts."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for batch in _batches(tokenizer.iter_with_specials(ids)):
        yield decoder.decode(b"".join(batch))
    yield decoder.decode(b"", final=True)
