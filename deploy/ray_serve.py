"""The service on Ray Serve: `serve run deploy.ray_serve:build replicas=2 gpus=1` (docs/ray.md).

    Ray's HTTP proxy  ->  Replica: the application of `inkstream serve`, without its HTTP server
The only file that imports Ray, and of Ray only the public API. INKSTREAM_ variables configure the service.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import click
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ray import serve
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.cli.serve import read_settings
from app.common import logs
from app.common.errors import NotReady
from app.common.settings import Settings
from app.main import create_app
from app.start import CHECKS, StartError, open_tracing
from model.checkpoint.hub import hub_model, resolve_weights

_log = logging.getLogger("inkstream")
_REMOVED = {
    "fronts": "Ray's own proxies forward the requests, one on each node (proxy_location)",
    "port": "requests go to Ray's proxy: serve start --http-port",
    "resends": "clients continue a stream whose replica was lost on another one (docs/scale.md)",
}
"""Arguments of the gateway that earlier versions had -> what replaces them."""


class Placement(BaseModel):
    """Arguments of `serve run deploy.ray_serve:build`: replica counts and resources."""

    model_config = ConfigDict(extra="forbid")

    replicas: int = Field(2, ge=1, description="Replicas of the service, each with its own weights and engine.")
    most_replicas: int = Field(0, ge=0, description="Maximum replicas with autoscaling; 0 disables autoscaling.")
    upscale_seconds: float = Field(30.0, ge=0, description="Overload that lasts so long starts a replica.")
    downscale_seconds: float = Field(600.0, ge=0, description="Idleness that lasts so long stops a replica.")
    gpus: float = Field(0, ge=0, description="GPUs per replica.")
    cpus: float = Field(1, ge=0, description="CPUs per replica that Ray reserves; INKSTREAM_THREADS limits their use.")

    @model_validator(mode="before")
    @classmethod
    def _reject_removed(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        for name in given:
            if name in _REMOVED:
                raise ValueError(f"{name} was an argument of the gateway, which is gone: {_REMOVED[name]}")
        return given

    @model_validator(mode="after")
    def _check_replicas(self) -> Placement:
        if self.most_replicas and self.most_replicas < self.replicas:
            raise ValueError(f"most_replicas ({self.most_replicas}) is below replicas ({self.replicas})")
        return self


class _Forwarded(Response):
    """A response that another ASGI application writes. Ray calls what a deployment returns with the request's scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class Replica:
    """One replica of the service, with its engines. Not serve.ingress: in Ray 2.10, its application has no replica."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Ray awaits it
        """Loads the model; Ray sends requests once this returns. Raises ValueError if the service cannot start here."""
        logs.set_up(settings.log_level, logs.resolve_format(settings.log_format))
        for check in CHECKS.values():
            check(settings)
        weights = await asyncio.to_thread(resolve_weights, settings.weights, _log.info)
        self._app = create_app(settings.model_copy(update={"weights": weights}), tracing=open_tracing(settings))
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        self._failure = asyncio.ensure_future(self._app.state.service.wait_stopped())
        while not self._is_ready():
            self.check_health()
            await asyncio.sleep(0.1)

    async def __call__(self, request: Request) -> Response:  # noqa: ARG002 - Ray calls the response with its scope
        """Ray calls this for every HTTP request."""
        return _Forwarded(self._app)

    def check_health(self) -> None:
        """Raises once the service has failed permanently, so that Ray replaces it; engine restarts are not failures."""
        if self._failure.done():
            raise RuntimeError(str(self._failure.result()))

    async def __del__(self) -> None:
        """Stops the service. Before, Ray waited for its open requests up to graceful_shutdown_timeout_s."""
        if hasattr(self, "_failure"):
            await self._lifespan.__aexit__(None, None, None)

    def _is_ready(self) -> bool:
        try:
            self._app.state.service.require_ready()
        except NotReady:
            return False
        return True


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """Builds the Ray Serve application. arguments: fields of Placement. Raises click.UsageError, which serve prints."""
    try:
        return _application(Placement.model_validate(arguments), read_settings({}))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        known = ", ".join(Placement.model_fields)
        name = "".join(f"{name}: " for name in first["loc"][:1])
        raise click.UsageError(f"{name}{first['msg'].removeprefix('Value error, ')}; arguments: {known}") from None
    except StartError as error:
        raise click.UsageError(str(error)) from None


def _application(placement: Placement, settings: Settings) -> serve.Application:
    if not settings.keys_file and not settings.insecure_no_auth:
        raise StartError(
            "other machines may reach a cluster, and no API key protects the service: set INKSTREAM_KEYS_FILE, or "
            "INKSTREAM_INSECURE_NO_AUTH=true if only trusted machines can reach it"
        )
    if hub_model(str(settings.weights)) is None:
        settings = settings.model_copy(update={"weights": settings.weights.absolute()})
    slots = settings.max_running * max(1, settings.replicas)
    deployment = serve.deployment(
        Replica,
        name="replica",
        ray_actor_options={"num_cpus": placement.cpus, "num_gpus": placement.gpus},
        # Ray's proxy fills the replicas of its own machine before it uses others: so no more than they soon run.
        max_ongoing_requests=slots + max(1, slots // 4),
        graceful_shutdown_timeout_s=settings.drain_timeout + 5,
        **_scaling(placement, settings),
    )
    return deployment.bind(settings)


def _scaling(placement: Placement, settings: Settings) -> dict[str, Any]:
    if not placement.most_replicas:
        return {"num_replicas": placement.replicas}
    if not settings.replicas:
        raise StartError("INKSTREAM_REPLICAS=auto: autoscaling needs the number of engines of a replica; give a number")
    return {
        "autoscaling_config": {
            "min_replicas": placement.replicas,
            "max_replicas": placement.most_replicas,
            "target_ongoing_requests": settings.max_running * settings.replicas,
            "upscale_delay_s": placement.upscale_seconds,
            "downscale_delay_s": placement.downscale_seconds,
        }
    }
