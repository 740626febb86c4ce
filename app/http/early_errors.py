"""Error responses to requests that are rejected before they reach a route, in the common error format."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from app.http.errors import ApiError, respond
from app.http.request_log import RequestLogMiddleware, record_early_error

_RETRY_AFTER_SECONDS = "2"


def response_bytes(error: ApiError, scope: Scope | None, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The complete response, which closes the connection; `headers` come first.

    scope: that of the request, if the application has seen it.
    """
    response = error.response(record_early_error(scope, error.status, error.code or error.type))
    all_headers = [*headers, *response.raw_headers, (b"x-content-type-options", b"nosniff"), (b"connection", b"close")]
    lines = [b"%s: %s\r\n" % header for header in all_headers]
    return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", response.body])


class RejectConnection:
    """ASGI wrapper for connections beyond the limits: answers health probes, rejects everything else with a 503."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._reject = RequestLogMiddleware(_reject)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # An orchestrator whose probe gets no response would restart a service that is only busy.
        is_probe = scope["path"].startswith("/health") and scope["method"] in ("GET", "HEAD")
        await (self._app if is_probe else self._reject)(scope, receive, send)


async def _reject(scope: Scope, receive: Receive, send: Send) -> None:
    message = "too many connections: close those that you do not need, and try again in a moment"
    error = ApiError(503, message, code="too_many_connections", headers={"Retry-After": _RETRY_AFTER_SECONDS})
    await respond(Request(scope), error)(scope, receive, send)
