"""API key authentication: with keys configured, every request needs one, except on routes marked public.

The check runs before routing and before any byte of the body is read, and does not parse paths itself: a request
without a key passes only if the router would dispatch exactly this request to a public route. Everything else gets a
401, so that new routes are private by default. Both wait for a turn while requests of keys run.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.access.api_keys import ApiKeys
from app.access.tenant import ANONYMOUS, Tenant
from app.http.best_effort import BestEffortTurns
from app.http.errors import ApiError
from app.http.request_log import record_of, respond

_PUBLIC_ATTRIBUTE = "inkstream_is_public"
_SCOPE_KEY = "inkstream_tenant"
_KEY_HEADER = re.compile(rb"\r\nauthorization:[ \t]*bearer ([^\r\n]+)(?=\r\n)", re.IGNORECASE)
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., object])


def public(endpoint: _Endpoint) -> _Endpoint:
    """Decorator for an endpoint that needs no key."""
    setattr(endpoint, _PUBLIC_ATTRIBUTE, True)
    return endpoint


def public_routes(routers: Sequence[APIRouter]) -> tuple[BaseRoute, ...]:
    """The public routes of these routers, which must be included without a prefix."""
    routes = (route for router in routers for route in router.routes)
    return tuple(
        route for route in routes if isinstance(route, Route) and getattr(route.endpoint, _PUBLIC_ATTRIBUTE, False)
    )


class AuthMiddleware:
    """ASGI middleware. Without `keys` all clients share one tenant."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys | None,
        public: Sequence[BaseRoute],
        best_effort: BestEffortTurns | None = None,
    ) -> None:
        self.app = app
        self._keys = keys
        self._public = public
        self._best_effort = best_effort or BestEffortTurns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._authenticate(scope, receive, send)
        else:  # no route handles WebSocket or any other protocol
            raise RuntimeError("only HTTP is supported")

    async def _authenticate(self, scope: Scope, receive: Receive, send: Send) -> None:
        result = _check_credentials(scope, self._keys) if self._keys else ANONYMOUS
        if isinstance(result, Tenant):
            scope[_SCOPE_KEY] = result
            record_of(Request(scope)).key = result.name or None
        is_public = bool(self._keys) and self._is_public(scope)
        if is_public or not isinstance(result, Tenant):
            await self._best_effort.turn_for(scope)
        if is_public:
            await self.app(scope, receive, send)
        elif isinstance(result, Tenant):
            with self._best_effort.paying():
                await self.app(scope, receive, send)
        else:
            await respond(Request(scope), result)(scope, receive, send)

    def _is_public(self, scope: Scope) -> bool:
        is_read = scope["method"] in ("GET", "HEAD")  # all that public routes answer, and cheaper to check
        return is_read and any(route.matches(scope)[0] is Match.FULL for route in self._public)


def tenant_of(request: Request) -> Tenant:
    """The tenant that AuthMiddleware authenticated. Not for public routes, which are not authenticated."""
    tenant: Tenant = request.scope[_SCOPE_KEY]
    return tenant


def is_authenticated(scope: Mapping[str, Any]) -> bool:
    """Whether AuthMiddleware accepted the API key of this request, or there are no keys."""
    return _SCOPE_KEY in scope


def has_known_key(head: bytes, keys: ApiKeys | None) -> bool:
    """Whether the start of a request, as it came, has one of the keys in its headers. Without keys, all have."""
    if keys is None:
        return True
    found = _KEY_HEADER.findall(head.partition(b"\r\n\r\n")[0] + b"\r\n")
    return len(found) == 1 and keys.tenant_of(found[0].strip(b" \t")) is not None


def owner_of(request: Request) -> str:
    """The owner of streams that this request starts: its tenant or, without configured keys, its credentials."""
    tenant = tenant_of(request)
    if tenant is not ANONYMOUS:
        return tenant.cache_namespace  # not the name, which a new key may reuse after this one is revoked
    return hashlib.sha256(request.headers.get("authorization", "").encode("latin-1")).hexdigest()


def _check_credentials(scope: Scope, keys: ApiKeys) -> Tenant | ApiError:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) > 1:  # a proxy in front of this service might use another one
        message = f"there are {len(values)} Authorization headers: send one header Authorization: Bearer KEY"
        challenge = 'Bearer realm="inkstream", error="invalid_request"'
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": challenge})
    scheme, _, key = values[0].partition(b" ") if values else (b"", b"", b"")
    key = key.strip(b" \t")
    if scheme.lower() != b"bearer" or not key:
        message = "missing API key: send the header Authorization: Bearer KEY"
        return ApiError(401, message, code="missing_api_key", headers={"WWW-Authenticate": 'Bearer realm="inkstream"'})
    if tenant := keys.tenant_of(key):
        return tenant
    challenge = 'Bearer realm="inkstream", error="invalid_token"'
    message = "invalid, revoked or expired API key: the operator creates one with inkstream keys add NAME"
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": challenge})
