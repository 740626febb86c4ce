"""Request body: reads a JSON body within the limits on its type, size and number of lists and objects."""

from __future__ import annotations

import re

from fastapi import Request
from starlette.requests import ClientDisconnect

from app.common.fault_injection import fault
from app.http.errors import ApiError

MAX_CONTAINERS = 32_768
"""Lists and objects in a JSON body. Each becomes a Python object: a megabyte of the smallest took 0.2 s and 80 MB."""
_NOT_JSON = (
    "the body must be JSON: send the header Content-Type: application/json (curl: -H 'content-type: application/json')"
)
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


async def read_json_body(request: Request, limit: int) -> bytearray:
    """The undecoded JSON body, of at most `limit` bytes. Raises ApiError 400, 413, 415."""
    _check_headers(request)
    body = await _read_limited(request, limit)
    fault("api.validate", body)
    if has_too_many_containers(body):
        message = f"the body holds more than {MAX_CONTAINERS} lists and objects: split it into several requests"
        raise ApiError(400, message, code="too_many_parts")
    return body


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


async def _read_limited(request: Request, limit: int) -> bytearray:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise _too_large(limit)
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
