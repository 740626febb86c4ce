"""Request body: reads a JSON body within limits on type, encoding, size, memory and number of lists and objects."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import Request
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from app.common.fault_injection import fault
from app.http.auth import tenant_of
from app.http.errors import ApiError
from app.http.incoming_bodies import SMALL_BODY, IncomingBodies

MAX_CONTAINERS = 32_768
"""Lists and objects in a JSON body. Each becomes a Python object: a megabyte of the smallest took 0.2 s and 80 MB."""
_NOT_JSON = (
    "the body must be JSON: send the header Content-Type: application/json (curl: -H 'content-type: application/json')"
)
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_RESERVATION_KEY = "inkstream_body_reservation"


@asynccontextmanager
async def json_body(request: Request, limit: int, bodies: IncomingBodies) -> AsyncIterator[bytearray]:
    """Provides the undecoded JSON body, of at most `limit` bytes, whose memory stays reserved until the block ends.

    Raises ApiError 400, 413, 415, RateLimitExceeded.
    """
    _check_headers(request)
    _check_declared(request.headers, limit)
    async with AsyncExitStack() as reservation:
        if read_before := request.scope.pop(_RESERVATION_KEY, None):
            reservation.push_async_callback(read_before.aclose)
        body = await _read_limited(request, limit, bodies, None if read_before else reservation)
        fault("api.validate", body)
        if has_too_many_containers(body):
            message = f"the body holds more than {MAX_CONTAINERS} lists and objects: split it into several requests"
            raise ApiError(400, message, code="too_many_parts")
        yield body


@asynccontextmanager
async def body_read_before(
    scope: Scope, receive: Receive, limit: int, bodies: IncomingBodies
) -> AsyncIterator[bytearray]:
    """Provides the body to a middleware that reads it before the application.

    json_body() takes over the reservation of its memory, if the application calls it inside the block.
    Raises ApiError 400, 413, RateLimitExceeded.
    """
    request = Request(scope, receive)
    _check_declared(request.headers, limit)
    async with AsyncExitStack() as reservation:
        body = await _read_limited(request, limit, bodies, reservation)
        scope[_RESERVATION_KEY] = reservation
        yield body


def utf8_json(body: bytearray) -> bytes:
    """The body without a byte order mark, as Windows' editors and shells write one. Raises ApiError 400.

    RFC 8259, 8.1: JSON that systems exchange is UTF-8, and a parser may ignore a byte order mark.
    """
    encoding = json.detect_encoding(body[:4])
    if encoding == "utf-8-sig":
        return bytes(memoryview(body)[len(codecs.BOM_UTF8) :])
    if encoding != "utf-8":
        name = encoding[:6].upper()
        message = f"the body is {name}, and JSON is UTF-8: convert it, for example with iconv -f {name} -t UTF-8"
        raise ApiError(400, message, code="invalid_json")
    return bytes(body)


def has_too_many_containers(body: bytes | bytearray) -> bool:
    """Whether the body has more than MAX_CONTAINERS lists and objects; brackets in strings do not count."""
    # Nearly all bodies pass the first count; those with many brackets in strings take some milliseconds.
    return _count(body) > MAX_CONTAINERS and _count(_STRING.sub(b"", body)) > MAX_CONTAINERS


def _check_headers(request: Request) -> None:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, _NOT_JSON)
    codings = [coding.strip().lower() for coding in request.headers.getlist("content-encoding")]
    if any(coding not in ("", "identity") for coding in codings):
        message = "the body must not be compressed: send it without Content-Encoding"
        raise ApiError(415, message, headers={"Accept-Encoding": "identity"})


def _check_declared(headers: Headers, limit: int) -> None:
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)


async def _read_limited(
    request: Request, limit: int, bodies: IncomingBodies, reservation: AsyncExitStack | None
) -> bytearray:
    """Reads the body; `reservation` gets the memory that a body needs which is not small."""
    tenant = tenant_of(request).cache_namespace
    size = int(request.headers.get("content-length") or 0)
    if reservation:
        await reservation.enter_async_context(bodies.reserved(tenant, size))
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise _too_large(limit)
            if reservation and not size and len(body) > SMALL_BODY:  # a chunked body declares no length
                size = limit
                await reservation.enter_async_context(bodies.reserved(tenant, limit))
    except ClientDisconnect:
        raise ApiError(400, "the connection closed before the end of the body") from None
    return body


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {limit} bytes: shorten it, or start the service with a larger --max-body-bytes",
        code="body_too_large",
    )


def _count(body: bytes | bytearray) -> int:
    return body.count(b"[") + body.count(b"{")
