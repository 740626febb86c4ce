"""How far the request is that a connection receives, and what it may still grow. Knows sizes, no bytes, no time."""

from __future__ import annotations

import enum

from app.http.connection_limits import HttpLimits
from app.http.errors import ApiError


class ReceivePhase(enum.Enum):
    """HEAD --all headers--> BODY --all of it--> DONE --first byte of another request--> HEAD."""

    HEAD = enum.auto()
    BODY = enum.auto()
    DONE = enum.auto()
    LINGER = enum.auto()
    """Nothing more is wanted: the connection is to be closed."""


class RequestLimits:
    """Owned by one connection. Every method that is told of something raises ApiError where it is too much."""

    def __init__(self, limits: HttpLimits) -> None:
        self.phase = ReceivePhase.HEAD
        self.head_bytes = 0
        """Received in HEAD; pieces that came with the end of an earlier request do not count."""
        self._limits = limits
        self._n_headers = 0
        self._header_bytes = 0
        self._bodiless_bytes = 0
        """Received since the last piece of a body."""
        self._began_in_piece = False

    def begin_head(self) -> None:
        """Another request."""
        self.phase, self.head_bytes, self._began_in_piece = ReceivePhase.HEAD, 0, True

    def begin_headers(self) -> None:
        """The parser has seen the beginning of a request."""
        self._n_headers = self._header_bytes = 0

    def url(self, size: int) -> None:
        """The URL is so long by now."""
        if size > self._limits.url_bytes:
            raise ApiError(414, f"the URL is longer than {self._limits.url_bytes} bytes", code="url_too_long")

    def header(self, size: int) -> None:
        """One more header, or a trailer, of so many bytes."""
        self._n_headers += 1
        self._header_bytes += size
        if self._header_bytes > self._limits.header_bytes:
            raise self._headers_too_large()
        if self._n_headers > self._limits.headers:
            raise ApiError(431, f"there are over {self._limits.headers} headers", code="headers_too_large")

    def begin_body(self) -> None:
        """All headers are there."""
        self.phase, self._bodiless_bytes = ReceivePhase.BODY, 0

    def body(self) -> None:
        """A piece of the body."""
        self._bodiless_bytes = 0

    def before(self, size: int) -> None:
        """So many bytes are about to be parsed."""
        self._bodiless_bytes += size
        self._began_in_piece = False

    def after(self, size: int) -> None:
        """They were parsed: what the parser keeps to itself must not grow without end."""
        if self.phase is ReceivePhase.HEAD and not self._began_in_piece:
            self.head_bytes += size
            if self.head_bytes > self._limits.url_bytes + self._limits.header_bytes:
                raise self._headers_too_large()
        if self.phase is ReceivePhase.BODY and self._bodiless_bytes > self._limits.header_bytes:
            raise ApiError(400, "the body's framing is longer than any body's", code="bad_request")

    def _headers_too_large(self) -> ApiError:
        return ApiError(431, f"the headers have over {self._limits.header_bytes} bytes", code="headers_too_large")
