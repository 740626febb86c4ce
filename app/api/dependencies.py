"""Dependencies of routes: the service, the tenant, size-limited body parsing, the weights version header."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from app.access.rate_limiter import ANONYMOUS, Tenant
from app.access.tenant_queue import WorkAccount
from app.api.metrics import Metrics
from app.api.resume_store import ResumeStore
from app.common.fault_injection import fault
from app.http.auth import caller_of
from app.http.errors import ApiError, from_validation
from app.http.sse import until_disconnect
from app.serving.service import Service
from app.tokenization.text_encoder import TokenizerPool

WEIGHTS_VERSION_HEADER = "X-Weights-Version"
MOST_PARTS = 32_768
"""Lists and objects in a JSON body. Each becomes a Python object: a megabyte of the smallest took 0.2 s and 80 MB."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_Body = TypeVar("_Body", bound=BaseModel)
_T = TypeVar("_T")


# FastAPI runs dependencies that are not coroutines in a thread pool, which delayed every first token.
async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _metrics(request: Request) -> Metrics:
    metrics: Metrics = request.app.state.metrics
    return metrics


async def _long_texts(request: Request) -> TokenizerPool:
    long_texts: TokenizerPool = request.app.state.long_texts
    return long_texts


async def _shelf(request: Request) -> ResumeStore:
    shelf: ResumeStore = request.app.state.shelf
    return shelf


async def _caller(request: Request) -> Tenant:
    return caller_of(request)


def owner_of(request: Request) -> str:
    """The owner of streams that this request starts: its tenant or, without configured keys, its credentials."""
    caller = caller_of(request)
    if caller is not ANONYMOUS:
        return caller.cache_namespace  # not the name, which a new key may reuse after this one is revoked
    return hashlib.sha256(request.headers.get("authorization", "").encode("latin-1")).hexdigest()


ServiceDep = Annotated[Service, Depends(_service)]
MetricsDep = Annotated[Metrics, Depends(_metrics)]
LongTextsDep = Annotated[TokenizerPool, Depends(_long_texts)]
ShelfDep = Annotated[ResumeStore, Depends(_shelf)]
CallerDep = Annotated[Tenant, Depends(_caller)]


def check_model(name: str | None, service: Service) -> None:
    """Raises ApiError 404 for an unknown model."""
    if name and not service.is_model_name(name):
        message = f"there is no model {name[:100]!r} here; the one that is served is {service.model_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


async def read_body(request: Request, model: type[_Body], limit: int) -> _Body:
    """Parses the JSON body as `model` and buffers at most `limit` bytes. Raises ApiError 400, 413, 415, and counts it.

    FastAPI's own parsing would read the whole body first, and accept NaN and unlimited nesting.
    """
    try:
        return await _read_body(request, model, limit)
    except ApiError:
        metrics: Metrics = request.app.state.metrics
        metrics.rejected("invalid")
        raise


async def _read_body(request: Request, model: type[_Body], limit: int) -> _Body:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, "the body must be JSON: send the header Content-Type: application/json")
    codings = [coding.strip().lower() for coding in request.headers.getlist("content-encoding")]
    if any(coding not in ("", "identity") for coding in codings):
        message = "the body must not be compressed: send it without Content-Encoding"
        raise ApiError(415, message, headers={"Accept-Encoding": "identity"})
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_large
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise too_large
    except ClientDisconnect:
        raise ApiError(400, "the connection closed before the end of the body") from None
    fault("api.validate", body)
    if has_too_many_parts(body):
        message = f"the body holds more than {MOST_PARTS} lists and objects: send the request in several"
        raise ApiError(400, message, code="too_many_parts")
    service: Service = request.app.state.service
    async with service.loop_share.parsing(body, WorkAccount(caller_of(request).cache_namespace)):
        try:
            return model.model_validate_json(bytes(body))
        except ValidationError as error:
            raise from_validation(error, model.model_fields) from None


async def while_connected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Returns the result of `work`; if the client disconnects first, cancels it and raises ApiError 499."""
    if (result := await until_disconnect(work, request.receive)) is None:
        raise ApiError(499, "the client has left")
    return result


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """A route's openapi_extra for the body that read_body() parses."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def version_header(weights_version: str) -> dict[str, str]:
    """The response header that names the weights."""
    return {WEIGHTS_VERSION_HEADER: weights_version}


def has_too_many_parts(body: bytes | bytearray) -> bool:
    """Whether the body has more than MOST_PARTS lists and objects; brackets in strings do not count."""
    # Nearly all bodies pass the first count; those with many brackets in strings cost some milliseconds.
    return _count(body) > MOST_PARTS and _count(_STRING.sub(b"", body)) > MOST_PARTS


def _count(body: bytes | bytearray) -> int:
    return body.count(b"[") + body.count(b"{")
