"""Every request gets an id before anything can fail, sent back in X-Request-Id, and one line in the log at its end."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.access_record import AccessRecord, new_request_id
from app.http.errors import ApiError, respond

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_log = logging.getLogger("inkstream.request")


class RequestLogMiddleware:
    """ASGI middleware, the outermost of ours: what fails behind it becomes an answer and a line."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record, began = AccessRecord.begin_in(scope), time.monotonic()

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
        except BaseException as error:  # a panic in Rust is no Exception
            record.outcome = "server_error"
            _log.error("request %s failed", record.request_id, exc_info=error)
            # Once the answer has begun there is nothing left to say: uvicorn cuts a connection whose answer stays open.
            if not record.status:
                bug = ApiError(500, "an error on our side; the request id names it in the server's log")
                await respond(Request(scope), bug)(scope, receive, send_with_id)
        finally:
            _write(scope, record, (time.monotonic() - began) * 1e3)


def note_refusal(scope: Scope | None, status: int, outcome: str) -> str:
    """A request is refused before it was read to its end; its id. Its line is written here, or where `scope` goes.

    scope: of the request, where the application has it already; else nothing of it is known.
    """
    if scope is not None:
        record = AccessRecord.begin_in(scope)
        record.refusal = status, outcome
        return record.request_id
    request_id = new_request_id()
    fields = {"request_id": request_id, "method": None, "route": None, "status": status, "key": None}
    _log.info("request", extra={"fields": {**fields, "outcome": outcome, "duration_ms": 0.0}})
    return request_id


def _write(scope: Scope, record: AccessRecord, duration_ms: float) -> None:
    """The one line: nothing that the client wrote is in it but which of our routes and methods it asked for."""
    if not _log.isEnabledFor(logging.INFO):
        return
    # Routes that FastAPI makes by itself have no path to tell, but a name.
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
    if record.facts:
        fields |= record.facts()
        fields["outcome"] = record.outcome or fields["outcome"]
    if record.refusal:
        fields["status"], fields["outcome"] = record.refusal
    _log.info("request", extra={"fields": fields})
