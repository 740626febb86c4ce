"""Request log: gives each request an id (X-Request-Id) before anything can fail, and writes one line at its end.

A caller's own X-Request-Id is kept, in the response, the log line, errors and traces. Routes find a completion by the
service's id instead, which is random: a caller can neither guess the id of another caller's completion nor take it.

Every exception becomes a response in the common error format here, because the line reports it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.common.errors import EngineError, Starting
from app.common.logs import REQUEST
from app.http.errors import ApiError, from_engine
from app.http.response_cycle import begin_head

if TYPE_CHECKING:
    from app.http.tracing import RequestTrace, Tracing  # its packages are optional

_SCOPE_KEY = "inkstream_record"
_RETRY_AFTER_SECONDS = "2"
_ALLOWED_METHODS = ("GET", "HEAD", "POST", "DELETE")
_ROUTES_HINT = "GET /docs lists the routes"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", None})
"""None: the head of the request did not arrive."""
_ROUTINE_ATTRIBUTE = "inkstream_is_routine"
_CALLERS_ID = re.compile(rb"[A-Za-z0-9_-]{1,64}")
_NO_ROUTE = "none"
_DISCONNECTED = 499
"""Status of a request whose client disconnected before the response started."""
_log = logging.getLogger(REQUEST)
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., object])

RequestCounts = Counter[tuple[str, str, int]]
"""Finished requests by method, route template and status; unknown methods and paths share one name each."""


def routine(endpoint: _Endpoint) -> _Endpoint:
    """Decorator for an endpoint whose successful requests, and a probe's 503, are logged at the level debug."""
    setattr(endpoint, _ROUTINE_ATTRIBUTE, True)
    return endpoint


@dataclass(slots=True)
class AccessRecord:
    """Filled while the request is handled; its owner is RequestLogMiddleware."""

    request_id: str
    """The service's own id, which is a completion's."""
    callers_id: str = ""
    """The X-Request-Id that the caller sent; empty if there was none, several, or a malformed one."""
    status: int = 0
    """0 until a response starts."""
    key: str | None = None
    """Name of the tenant's API key."""
    outcome: str | None = None
    """How the request ended: a finish_reason, or the type or code of an error."""
    log_fields: Callable[[], Mapping[str, Any]] | None = None
    """Called at the end: counts and milliseconds of a completion, and its outcome."""
    trace: RequestTrace | None = None
    """None unless traces are exported."""
    early_error: tuple[int, str] | None = None
    """Status and code of an error that the connection sent itself; the application only saw a disconnect."""
    is_during_start: bool = False
    """Whether the request came before the first model was loaded, and was refused for that."""

    @classmethod
    def get_or_create(cls, scope: Scope) -> AccessRecord:
        """Returns the record of this scope, or stores a new one with a new request id."""
        if _SCOPE_KEY not in scope:
            scope[_SCOPE_KEY] = cls(new_request_id(), _callers_id(scope))
        record: AccessRecord = scope[_SCOPE_KEY]
        return record

    @property
    def public_id(self) -> str:
        """The id in the response, errors, logs and traces."""
        return self.callers_id or self.request_id


def _callers_id(scope: Scope) -> str:
    """The caller's X-Request-Id, if it is one short word: others could forge log lines or headers, or fill the log."""
    values = [value for name, value in scope.get("headers", ()) if name == b"x-request-id"]
    return values[0].decode("ascii") if len(values) == 1 and _CALLERS_ID.fullmatch(values[0]) else ""


def new_request_id() -> str:
    """An unguessable request id."""
    return f"req-{secrets.token_hex(12)}"


def record_of(request: Request) -> AccessRecord:
    """The record of this request."""
    record: AccessRecord = request.scope[_SCOPE_KEY]
    return record


class RequestLogMiddleware:
    """The outermost ASGI middleware: turns every failure inside it into a response and a log line."""

    def __init__(self, app: ASGIApp, counts: RequestCounts | None = None, tracing: Tracing | None = None) -> None:
        self.app = app
        self._tracing = tracing
        self._counts = RequestCounts() if counts is None else counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record, started = AccessRecord.get_or_create(scope), time.monotonic()
        if self._tracing:
            record.trace = self._tracing.request(scope, started)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = [h for h in message["headers"] if h[0].lower() != b"x-request-id"]
                extra = [(b"x-request-id", record.public_id.encode()), (b"x-content-type-options", b"nosniff")]
                message = {**message, "headers": [*headers, *extra]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # PanicException of PyO3 does not derive from Exception
            record.outcome = "server_error"
            _log.error("request %s failed", record.public_id, exc_info=error)
            # Once the response has started no error can be sent: HttpProtocol then cuts the connection.
            if not record.status:
                error_response = ApiError(500, "internal error; look up the request id in the server's log")
                await respond(Request(scope), error_response)(scope, receive, send_with_id)
        finally:
            self._counts[_series(scope, record)] += 1
            if record.trace:
                _, _, status = _series(scope, record)
                record.trace.end_response(record.public_id, record.key, status, _outcome(record))
            _log_request(scope, record, (time.monotonic() - started) * 1e3)


def _series(scope: Scope, record: AccessRecord) -> tuple[str, str, int]:
    """The request's key in RequestCounts. Requests that were rejected before routing have no route."""
    status = record.early_error[0] if record.early_error else record.status or _DISCONNECTED
    return _method(scope) or _NO_ROUTE, _route(scope) or _NO_ROUTE, status


def _outcome(record: AccessRecord) -> str:
    default = "ok" if 0 < record.status < 400 else "disconnected" if not record.status else "error"
    return record.outcome or default


def _method(scope: Scope) -> str | None:
    return scope["method"] if scope["method"] in _METHODS else "other"


def _route(scope: Scope) -> str | None:
    """The route's template; for FastAPI's built-in routes, which have no path, the endpoint's name."""
    return getattr(scope.get("route"), "path", None) or getattr(scope.get("endpoint"), "__name__", None)


def _log_request(scope: Scope, record: AccessRecord, duration_ms: float) -> None:
    """Writes the log line, which contains no client input except the route, the method and a well-formed id."""
    level = _level(scope, record)
    if not _log.isEnabledFor(level):
        return
    fields: dict[str, Any] = {
        "request_id": record.public_id,
        "method": _method(scope),
        "route": _route(scope),
        "status": record.status or _DISCONNECTED,
        "key": record.key,
        "outcome": _outcome(record),
        "duration_ms": round(duration_ms, 3),
    }
    if record.callers_id:
        fields["completion_id"] = record.request_id  # the name in other log lines
    if record.trace and record.trace.exemplar:
        fields["trace_id"] = record.trace.exemplar["trace_id"]
    if record.log_fields:
        fields |= record.log_fields()
        fields["outcome"] = record.outcome or fields["outcome"]
    if record.early_error:
        fields["status"], fields["outcome"] = record.early_error
    _log.log(level, "request", extra={"fields": fields})


def _level(scope: Scope, record: AccessRecord) -> int:
    """Debug for what says nothing new: probes and scrapes, files of the page, and polling until the model is loaded."""
    is_routine = getattr(scope.get("endpoint"), _ROUTINE_ATTRIBUTE, False) and (
        0 < record.status < 400 or record.status == 503
    )
    return logging.DEBUG if (is_routine or record.is_during_start) and not record.early_error else logging.INFO


def early_response(error: ApiError, scope: Scope | None, counts: RequestCounts) -> bytes:
    """The complete response to a request that was rejected before it was read, after which the connection closes.

    scope: the request's, if the application has seen it and will log and count it; otherwise this function does.
    """
    record = AccessRecord.get_or_create({} if scope is None else scope)
    record.early_error = error.status, error.code or error.type
    if scope is None:
        counts[_series({"method": None}, record)] += 1
        _log_request({"method": None}, record, 0.0)
    response = error.response(record.public_id)
    headers = [*response.raw_headers, (b"x-content-type-options", b"nosniff"), (b"connection", b"close")]
    return b"".join([begin_head(error.status), *[b"%b: %b\r\n" % header for header in headers], b"\r\n", response.body])


class RejectConnection:
    """ASGI wrapper for connections beyond the limits: answers health probes, rejects everything else with a 503."""

    def __init__(self, app: ASGIApp, counts: RequestCounts) -> None:
        self._app = app
        self._reject = RequestLogMiddleware(_reject, counts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # An orchestrator whose probe gets no response would restart a service that is only busy.
        is_probe = scope["path"].startswith("/health") and scope["method"] in ("GET", "HEAD")
        await (self._app if is_probe else self._reject)(scope, receive, send)


async def _reject(scope: Scope, receive: Receive, send: Send) -> None:
    message = "too many connections: close those that you do not need, and try again in a moment"
    error = ApiError(503, message, code="too_many_connections", headers={"Retry-After": _RETRY_AFTER_SECONDS})
    await respond(Request(scope), error)(scope, receive, send)


def install(app: FastAPI) -> None:
    """Installs handlers that turn every exception of a route into the common format."""
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(EngineError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_framework_validation)


def respond(request: Request, error: ApiError) -> Response:
    """The error as a response, which the request log reports."""
    record = record_of(request)
    record.outcome = error.code or error.type
    return error.response(record.public_id)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError | EngineError)
    record_of(request).is_during_start = isinstance(error, Starting)
    return respond(request, error if isinstance(error, ApiError) else from_engine(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's HTTP exceptions: unknown route, wrong method."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        path = request.scope["path"][:100]
        without = path.rstrip("/")
        # No redirect: its address would come from the Host header, and clients resend a POST as a GET.
        hint = f"leave out the / at the end of {path}" if without and _allowed(request, without) else _ROUTES_HINT
        message = f"there is no route {path}: {hint}"
        return respond(request, ApiError(404, message, headers=headers))
    if error.status_code == 405:
        allowed = ", ".join(_allowed(request, request.scope["path"])) or "another method"
        message = f"{request.method[:20]} is not allowed here; use {allowed}"
        return respond(request, ApiError(405, message, headers={**headers, "Allow": allowed}))
    return respond(request, ApiError(error.status_code, str(error.detail)[:200], headers=headers))


def _allowed(request: Request, path: str) -> list[str]:
    """The methods of a path. Starlette reports only the first matching route's: for a page, HEAD."""
    scope, routes = {**request.scope, "path": path}, request.app.routes
    return [m for m in _ALLOWED_METHODS if any(r.matches(scope | {"method": m})[0] is Match.FULL for r in routes)]


async def _on_framework_validation(request: Request, error: Exception) -> Response:
    """FastAPI's validation of path and query parameters."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])[:60]
    return respond(request, ApiError(400, f"{name}: {first['msg']}"[:200], param=name))
