"""Direct calls of the endpoints whose only parameter is the request."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature

from fastapi import Request
from fastapi.routing import APIRoute, APIRouter
from starlette.types import ASGIApp, Receive, Scope, Send


class DirectRoutes:
    """ASGI application around FastAPI's router: calls an endpoint whose only parameter is `request` without it.

    The router matches each request twice and enters two exit stacks that only dependencies use, and its handler solves
    dependencies: half of a short request's time (PERFORMANCE.md). A route that declares dependencies keeps all of it;
    dependencies of an include_router() call are not solved.
    """

    def __init__(self, router: ASGIApp, routers: Iterable[APIRouter]) -> None:
        """`routers` are included in `router`, without a prefix; their endpoints are coroutines."""
        self._router = router
        self._routes = {
            (route.path, method): route
            for each in routers
            for route in each.routes
            if isinstance(route, APIRoute) and _takes_request(route)
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope["path"], scope["method"])) if scope["type"] == "http" else None
        if route is None:
            await self._router(scope, receive, send)
            return
        scope.update(route=route, endpoint=route.endpoint, path_params={})
        response = await route.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


def _takes_request(route: APIRoute) -> bool:
    """Whether the endpoint's only parameter is `request`, and nothing else has to run before it."""
    is_direct = not route.param_convertors and not route.dependencies
    return is_direct and list(signature(route.endpoint).parameters) == ["request"]
