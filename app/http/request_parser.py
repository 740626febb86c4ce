"""HTTP/1.1 request parser: llhttp (httptools) without protocol switches, and checks of headers beyond the parser's."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol

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
    """Raises ApiError 400 for the HTTP/2 preface, which llhttp would read to its end before it fails."""
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


class _Events(Protocol):
    """The parser's callbacks, in this order for each request; any of them may raise to stop the parser."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class RequestParser:
    """Drop-in for httptools.HttpRequestParser that ignores every offer to upgrade (RFC 9110, 7.8).

    llhttp ends a request that offers an upgrade with its headers: httptools reports the end of the message and raises
    HttpParserUpgrade with the position of the first byte behind the head. Those bytes are the body of the request. This
    class drops the early end and gives a new llhttp parser the same head without the Upgrade field. The new parser
    therefore applies the same framing (Content-Length, Transfer-Encoding, Connection), and reads the body and all
    requests after it. The events of the repeated head are dropped, as the first parser has sent them.
    """

    def __init__(self, events: _Events) -> None:
        self._events = events
        self._headers: list[tuple[bytes, bytes]] = []
        self._is_repeating_head = False
        self.on_body = events.on_body
        self._parser = self._new_parser()

    def feed_data(self, data: bytes) -> None:
        """Parses the next bytes of the connection, however they are split. Raises httptools.HttpParserError."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                self._repeat_head()
                data = data[offer.args[0] :]

    def close(self) -> None:
        """Releases the parser, which refers to this object and through it to the connection."""
        del self._parser, self._events, self.on_body

    def get_method(self) -> bytes:
        """Method of the current request."""
        return self._parser.get_method()

    def get_http_version(self) -> str:
        """Version of the current request, as "1.1"."""
        return self._parser.get_http_version()

    def should_keep_alive(self) -> bool:
        """Whether another request may follow the current one."""
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        """Never: the connection keeps speaking HTTP/1.1."""
        return False

    def on_message_begin(self) -> None:
        """llhttp: first byte of a request."""
        if not self._is_repeating_head:
            self._headers.clear()
            self._events.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """llhttp: part of the request target."""
        if not self._is_repeating_head:
            self._events.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """llhttp: a header or trailer field. llhttp leaves the whitespace behind the value (RFC 9110, 5.5) on it."""
        if not self._is_repeating_head:
            value = value.rstrip(b" \t")
            self._headers.append((name, value))
            self._events.on_header(name, value)

    def on_headers_complete(self) -> None:
        """llhttp: end of the head."""
        if not self._is_repeating_head:
            self._events.on_headers_complete()

    def on_message_complete(self) -> None:
        """llhttp: end of the request, or of its head where it offers an upgrade."""
        if not self._parser.should_upgrade():
            self._events.on_message_complete()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Bytes after the last request of a connection are dropped: an error would cost that request its answer.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _repeat_head(self) -> None:
        """Continues with a parser that has seen the same head without the offer."""
        request_line = b"%b / HTTP/%b\r\n" % (self.get_method(), self.get_http_version().encode())
        fields = [b"%b: %b\r\n" % field for field in self._headers if field[0].lower() != b"upgrade"]
        self._parser = self._new_parser()
        self._is_repeating_head = True
        try:
            self._parser.feed_data(b"".join([request_line, *fields, b"\r\n"]))
        finally:
            self._is_repeating_head = False
