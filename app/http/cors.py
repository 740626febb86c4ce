"""Cross-origin requests (CORS), with the common error format."""

from __future__ import annotations

from collections.abc import Collection

from fastapi import Request
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.best_effort import BestEffortTurns
from app.http.errors import ApiError
from app.http.request_log import respond


class CorsMiddleware(CORSMiddleware):
    """Starlette's middleware with the common error format. API keys authenticate clients; there are no cookies."""

    def __init__(self, app: ASGIApp, origins: Collection[str], best_effort: BestEffortTurns | None = None) -> None:
        self._best_effort = best_effort or BestEffortTurns()
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("Authorization", "Idempotency-Key", "Last-Event-ID"),
            expose_headers=("Idempotent-Replayed", "Retry-After", "X-Request-Id", "X-Weights-Version"),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            await self._best_effort.turn_for(scope)
            headers = Headers(scope=scope)
            is_preflight = "access-control-request-method" in headers
            if is_preflight and not self.is_allowed_origin(headers.get("origin", "")):
                error = ApiError(403, "this origin is not allowed: start the service with --allow-origin")
                await respond(Request(scope), error)(scope, receive, send)
                return
        await super().__call__(scope, receive, send)
