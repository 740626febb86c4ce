"""The service with the fake engine: `python -m tests.support.fake_service STEP_MS serve FLAGS...`.

CALLERS in the environment identifies tenants by the header `X-Caller`, without keys: JSON, quota fields by name.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from app import main as wiring
from app import server
from app.__main__ import main
from app.access.rate_limiter import ANONYMOUS, RateLimits, Tenant
from app.engine_client import engine_pool
from app.http import auth
from app.serving import instance_factory


class _TenantByHeader:
    def __init__(self, app: ASGIApp, quotas: dict[str, dict[str, int]]) -> None:
        self._app = app
        self._tenants = {
            name: Tenant(name=name, cache_namespace=f"namespace of {name}", limits=RateLimits(**quota))
            for name, quota in quotas.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope[auth._SCOPE_KEY] = self._tenants.get(Headers(scope=scope).get("x-caller", ""), ANONYMOUS)
        await self._app(scope, receive, send)


def _with_tenants(quotas: dict[str, dict[str, int]]) -> Callable[..., FastAPI]:
    def create_app(*arguments: Any) -> FastAPI:
        app = wiring.create_app(*arguments)
        app.user_middleware.append(Middleware(_TenantByHeader, quotas=quotas))  # the innermost one
        return app

    return create_app


if __name__ == "__main__":
    command = (sys.executable, "-P", "-m", "tests.support.fake_engine", sys.argv[1])
    engine_pool.EngineClient.__init__.__kwdefaults__["command"] = command
    assert instance_factory.EngineClient is engine_pool.EngineClient
    if "CALLERS" in os.environ:
        server.create_app = _with_tenants(json.loads(os.environ["CALLERS"]))
    sys.exit(main(sys.argv[2:]))
