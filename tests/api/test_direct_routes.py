"""Requests that DirectRoutes dispatches reach the endpoint that FastAPI's router chooses for them."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi.routing import APIRouter
from starlette.routing import Match

from app.api.direct_routes import DirectRoutes
from app.common.settings import Settings
from app.main import create_app
from tests.support.async_test import async_test

ALWAYS_DIRECT = {("/complete", "POST"), ("/v1/completions", "POST"), ("/v1/chat/completions", "POST"),
                 ("/health/live", "GET"), ("/health/ready", "GET"), ("/metrics", "GET")}  # fmt: skip


def _direct_routes() -> tuple[DirectRoutes, APIRouter]:
    router = create_app(Settings()).router
    assert isinstance(router.middleware_stack, DirectRoutes)
    return router.middleware_stack, router


def test_the_router_would_choose_the_same_endpoint() -> None:
    direct, router = _direct_routes()
    assert direct._routes.keys() >= ALWAYS_DIRECT
    for (path, method), route in direct._routes.items():
        scope: dict[str, Any] = {"type": "http", "path": path, "method": method, "root_path": "", "headers": []}
        matches = (other.matches(dict(scope)) for other in router.routes)
        found = next(child_scope for match, child_scope in matches if match is Match.FULL)
        chosen = found.get("endpoint") or _included_endpoint(router, scope)
        assert chosen is route.endpoint, (path, method)


def _included_endpoint(router: APIRouter, scope: dict[str, Any]) -> Any:
    """Where FastAPI matches included routers as a whole: the first matching endpoint among their routes."""
    routes = [
        route for other in router.routes for route in getattr(getattr(other, "original_router", None), "routes", ())
    ]
    matches = (route.matches(dict(scope)) for route in routes)
    return next(child_scope["endpoint"] for match, child_scope in matches if match is Match.FULL)


@async_test
async def test_other_paths_and_methods_go_to_the_router() -> None:
    direct, _ = _direct_routes()
    seen: list[tuple[str, str]] = []

    async def router(scope: Any, _receive: Any, _send: Any) -> None:
        seen.append((scope["path"], scope["method"]))

    direct._router = router
    others = [("/complete", "GET"), ("/complete/", "POST"), ("/complete/x/events", "GET"), ("//complete", "POST")]
    for path, method in others:
        await direct({"type": "http", "path": path, "method": method}, asyncio.Event().wait, asyncio.Event().wait)  # type: ignore[arg-type]
    assert seen == others
