"""Request log: assigns each request an id (X-Request-Id) before anything can fail, and writes one line at its end."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.access_record import AccessRecord
from app.http.errors import ApiError, respond

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", None})
"""None: the head of the request did not arrive."""
_log = logging.getLogger("inkstream.request")


class RequestLogMiddleware:
    """The outermost ASGI middleware: turns every failure inside it into a response and a log line."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record, started = AccessRecord.get_or_create(scope), time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = [h for h in message["headers"] if h[0].lower() != b"x-request-id"]
                extra = [(b"x-request-id", record.request_id.encode()), (b"x-content-type-options", b"nosniff")]
                message = {**message, "headers": [*headers, *extra]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # PanicException of PyO3 does not derive from Exception
            record.outcome = "server_error"
            _log.error("request %s failed", record.request_id, exc_info=error)
            # Once the response has started no error can be sent: uvicorn cuts the connection of an incomplete response.
            if not record.status:
                error_response = ApiError(500, "internal error; look up the request id in the server's log")
                await respond(Request(scope), error_response)(scope, receive, send_with_id)
        finally:
            _log_request(scope, record, (time.monotonic() - started) * 1e3)


def record_early_error(scope: Scope | None, status: int, outcome: str) -> str:
    """Records a request that was rejected before it was completely read; returns its id.

    scope: that of the request, if the application has seen it and will log it; otherwise this function logs it.
    """
    record = AccessRecord.get_or_create({} if scope is None else scope)
    record.early_error = status, outcome
    if scope is None:
        _log_request({"method": None}, record, 0.0)
    return record.request_id


def _log_request(scope: Scope, record: AccessRecord, duration_ms: float) -> None:
    """Writes the log line, which contains no client input except the route and the method."""
    if not _log.isEnabledFor(logging.INFO):
        return
    # FastAPI's built-in routes have no path, but a name.
    route = getattr(scope.get("route"), "path", None) or getattr(scope.get("endpoint"), "__name__", None)
    outcome = record.outcome or ("ok" if 0 < record.status < 400 else "disconnected" if not record.status else "error")
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "method": scope["method"] if scope["method"] in _METHODS else "other",
        "route": route,
        "status": record.status or 499,
        "key": record.key,
        "outcome": outcome,
        "duration_ms": round(duration_ms, 3),
    }
    if record.log_fields:
        fields |= record.log_fields()
        fields["outcome"] = record.outcome or fields["outcome"]
    if record.early_error:
        fields["status"], fields["outcome"] = record.early_error
    _log.info("request", extra={"fields": fields})
