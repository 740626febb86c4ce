"""The service with the fake engine: `python -m tests.support.fake_service STEP_MS serve FLAGS...`.

CALLERS in the environment identifies tenants by the header `X-Caller`, without keys: JSON, quota fields by name.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request

from app import main as wiring
from app import server
from app.__main__ import main
from app.access.rate_limiter import ANONYMOUS, RateLimits, Tenant
from app.api.dependencies import TenantDep
from app.engine_client import client


def _by_header(quotas: dict[str, dict[str, int]]) -> Callable[[Request], Awaitable[Tenant]]:
    tenants = {
        name: Tenant(name=name, cache_namespace=f"namespace of {name}", limits=RateLimits(**quota))
        for name, quota in quotas.items()
    }

    async def tenant(request: Request) -> Tenant:
        return tenants.get(request.headers.get("x-caller", ""), ANONYMOUS)

    return tenant


def _with_tenants(quotas: dict[str, dict[str, int]]) -> Callable[..., FastAPI]:
    def create_app(*arguments: Any) -> FastAPI:
        app = wiring.create_app(*arguments)
        app.dependency_overrides[TenantDep.__metadata__[0].dependency] = _by_header(quotas)
        return app

    return create_app


if __name__ == "__main__":
    command = (sys.executable, "-P", "-m", "tests.support.fake_engine", sys.argv[1])
    client.EngineClient.__init__.__kwdefaults__["command"] = command
    assert wiring.EngineClient is client.EngineClient
    if "CALLERS" in os.environ:
        server.create_app = _with_tenants(json.loads(os.environ["CALLERS"]))
    sys.exit(main(sys.argv[2:]))
