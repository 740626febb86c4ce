"""Whose pages may read our answers (CORS): nobody's but our own, unless an origin is allowed. Knows no route."""

from __future__ import annotations

from collections.abc import Collection

from fastapi import Request
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.errors import ApiError, respond


class CorsMiddleware(CORSMiddleware):
    """Starlette's, with our errors. Cookies are never taken: who may ask is said by the key."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("Authorization", "Last-Event-ID"),
            expose_headers=("X-Request-Id", "X-Weights-Version", "Retry-After"),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            given = dict(scope["headers"])
            if b"access-control-request-method" in given:
                origin = given.get(b"origin", b"").decode("latin-1")
                if not self.is_allowed_origin(origin):
                    error = ApiError(403, "pages of this origin may not use this service: see --allow-origin")
                    await respond(Request(scope), error)(scope, receive, send)
                    return
        await super().__call__(scope, receive, send)
