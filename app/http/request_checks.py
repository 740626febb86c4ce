"""What a request's head, trailers and framing may be: sizes, version, target, transfer coding. Everything else is 400.

The status is 400 and not 501 or 505, because monitoring counts every 5xx as a fault of the service, and any client can
send such a head.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import httptools

from app.http.connection_limits import HttpLimits, ReceivePhase
from app.http.errors import ApiError

_VERSIONS = ("1.1", "1.0")
_UNSUPPORTED_VERSION = "this service supports HTTP/1.0 and HTTP/1.1: send the request in one of them"
_FORBIDDEN_TRAILERS = frozenset((b"connection", b"content-length", b"host", b"transfer-encoding", b"upgrade"))
"""Fields that change how a message is framed or routed (RFC 9110, 6.5.1); llhttp would act on some of them."""


class Target(NamedTuple):
    """A request target in the origin form or the absolute form of RFC 9112, 3.2."""

    host: bytes | None
    """Of the absolute form, without its port."""
    path: bytes
    query: bytes


class RequestChecks:
    """Checks of one connection. Each method gets what the parser reports, and raises ApiError if it is not allowed."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._n_headers = 0
        self._header_bytes = 0
        self._buffered_bytes = 0
        """Bytes received since the parser's last event, at most: the parser may buffer them."""

    def begin_request(self) -> None:
        """The parser has seen the start of a request."""
        self._n_headers = self._header_bytes = self._buffered_bytes = 0

    def check_url(self, url: bytes, method: bytes) -> None:
        """The URL so far. Also refuses the HTTP/2 preface, which llhttp would read to its end before it fails."""
        self._buffered_bytes = 0
        if len(url) > self._limits.url_bytes:
            message = f"the URL is longer than {self._limits.url_bytes} bytes: send a shorter one"
            raise ApiError(414, message, code="url_too_long")
        if method == b"PRI":
            raise _bad_request(_UNSUPPORTED_VERSION)

    def check_field(self, name: bytes, value: bytes) -> None:
        """A header or trailer field."""
        self._buffered_bytes = 0
        self._n_headers += 1
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > self._limits.header_bytes:
            raise self._headers_too_large()
        if self._n_headers > self._limits.headers:
            message = f"the request has more than {self._limits.headers} headers: send fewer"
            raise ApiError(431, message, code="headers_too_large")

    def check_trailer(self, name: bytes, value: bytes) -> None:
        """A field after the body."""
        self.check_field(name, value)
        if name.lower() in _FORBIDDEN_TRAILERS:
            raise _bad_request(f"{name.decode('latin-1')} is not allowed in trailers: send it with the headers")

    def check_head(self, method: bytes, version: str, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Target:
        """A whole head, whose field names are in lower case; returns its target."""
        if version not in _VERSIONS:
            raise _bad_request(_UNSUPPORTED_VERSION)
        if method == b"CONNECT":
            raise _bad_request("this service is not a proxy: send the request itself instead of CONNECT")
        codings = [value for name, value in headers if name == b"transfer-encoding"]
        if codings and version == "1.0":  # RFC 9112, 6.1: an HTTP/1.0 proxy on the way may frame it differently
            raise _bad_request("HTTP/1.0 has no Transfer-Encoding: send the body with Content-Length, or as HTTP/1.1")
        if codings and (len(codings) > 1 or codings[0].strip().lower() != b"chunked"):
            message = "the only supported Transfer-Encoding is chunked: send the body with it, or with Content-Length"
            raise _bad_request(message)
        return _parse_target(url)

    def record_body(self) -> None:
        """A part of the body's data has arrived."""
        self._buffered_bytes = 0

    def before_parsing(self, size: int) -> None:
        """Records `size` bytes before they are parsed."""
        self._buffered_bytes += size

    def after_parsing(self, phase: ReceivePhase) -> None:
        """Checks that the parser's own buffers stay bounded."""
        limit = self._limits.header_bytes
        if phase is ReceivePhase.HEAD and self._buffered_bytes > self._limits.url_bytes + limit:
            raise self._headers_too_large()
        if phase is ReceivePhase.BODY and self._buffered_bytes > limit:
            raise _bad_request(f"the body has over {limit} bytes of framing without data")

    def _headers_too_large(self) -> ApiError:
        message = f"the headers are longer than {self._limits.header_bytes} bytes: send fewer or shorter ones"
        return ApiError(431, message, code="headers_too_large")


def _parse_target(url: bytes) -> Target:
    if b"#" in url:
        raise _bad_request("a request target has no fragment: send the URL up to the #")
    try:
        parts = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        parts = None
    is_path = url.startswith(b"/")
    if parts is None or not parts.path or not (is_path or parts.host):
        raise _bad_request("the request target must be a path like /complete or a URL like http://host/complete")
    host = None if is_path else parts.host
    return Target(b"[%b]" % host if host and b":" in host else host, parts.path, parts.query or b"")


def _bad_request(message: str) -> ApiError:
    return ApiError(400, message, code="bad_request")
