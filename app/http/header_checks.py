"""Checks of a request's head and trailers beyond those of the parser: versions, framing and request targets."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import httptools

from app.http.errors import ApiError
from app.http.host_filter import TARGET

_VERSIONS = ("1.1", "1.0")
_SPOKEN = "this service speaks HTTP/1.0 and HTTP/1.1: send the request as one"
_NOT_IN_TRAILERS = frozenset((b"connection", b"content-length", b"host", b"transfer-encoding", b"upgrade"))
"""Fields that change how a message is framed or routed (RFC 9110, 6.5.1); llhttp would act on some of them."""


def check(scope: MutableMapping[str, Any], method: bytes, version: str, url: bytes) -> None:
    """Raises ApiError 400 for a head that the service does not accept; puts the host of an absolute URL in the scope.

    The status is 400 and not 501 or 505: operators count a 5xx as a fault of the service, and any client can send such
    a head.
    """
    if version not in _VERSIONS:
        raise _refused(_SPOKEN)
    if method == b"CONNECT":
        raise _refused("this service is not a proxy: send the request itself instead of CONNECT")
    codings = [value for name, value in scope["headers"] if name == b"transfer-encoding"]
    if codings and version == "1.0":  # RFC 9112, 6.1: an HTTP/1.0 proxy on the way may frame the message differently
        raise _refused("HTTP/1.0 has no Transfer-Encoding: send the body with Content-Length, or as HTTP/1.1")
    if codings and (len(codings) > 1 or codings[0].strip().lower() != b"chunked"):
        message = "the only Transfer-Encoding here is chunked: send the body without any other, or with Content-Length"
        raise _refused(message)
    _check_target(scope, url)


def check_method(method: bytes) -> None:
    """Raises ApiError 400 for the preface of HTTP/2, of which llhttp waits for the end before it says anything."""
    if method == b"PRI":
        raise _refused(_SPOKEN)


def check_trailer(name: bytes) -> None:
    """Raises ApiError 400 for a field that must not come after the body."""
    if name.lower() in _NOT_IN_TRAILERS:
        raise _refused(f"{name.decode('latin-1')} is not allowed in trailers: send it with the headers")


def _check_target(scope: MutableMapping[str, Any], url: bytes) -> None:
    """Accepts the origin form and the absolute form of RFC 9112, 3.2, without a fragment."""
    if b"#" in url:
        raise _refused("a request target has no fragment: send the URL up to the #")
    if url.startswith(b"/"):
        return
    try:
        parts = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        parts = None
    if parts is None or not parts.host or not parts.path:
        raise _refused("the request target must be a path like /complete or a URL like http://host/complete")
    scope[TARGET] = b"[%b]" % parts.host if b":" in parts.host else parts.host


def _refused(message: str) -> ApiError:
    return ApiError(400, message, code="bad_request")
