"""The service on a Ray Serve cluster: `serve run deploy.ray_serve:build replicas=2 gpus=1` (docs/ray.md).

    Ray's HTTP proxies  ->  FrontReplica: gateway of app/cluster  ->  EngineReplica: the whole service with its engine
The only file that imports Ray. The usual INKSTREAM_ variables configure the service.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import click
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ray import exceptions, serve
from ray.serve.config import AutoscalingContext
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from app.cli.serve import read_settings
from app.cluster.gateway import Gateway
from app.cluster.messages import Address
from app.cluster.replica_pool import ReplicaPool
from app.cluster.replica_server import ReplicaServer
from app.common import logs
from app.common.errors import NotReady
from app.common.settings import Settings
from app.http.connection_limits import ConnectionLimits
from app.http.http_protocol import HttpProtocol
from app.main import connection_limits, create_app
from app.start import StartError, bind, open_tracing

_log = logging.getLogger("inkstream.relay")
_LOOK_SECONDS = 1.0
"""Interval at which the gateway asks Ray for the current replicas."""
_OPEN_REQUESTS = "open_requests"


class Placement(BaseModel):
    """Arguments of `serve run deploy.ray_serve:build`: replica counts and resources."""

    model_config = ConfigDict(extra="forbid")

    replicas: int = Field(2, ge=1, description="Replicas of the service, each with its own weights and engine.")
    most_replicas: int = Field(0, ge=0, description="Maximum replicas with autoscaling; 0 disables autoscaling.")
    upscale_seconds: float = Field(30.0, ge=0, description="Overload that lasts so long starts a replica.")
    downscale_seconds: float = Field(600.0, ge=0, description="Idleness that lasts so long stops a replica.")
    gpus: float = Field(0, ge=0, description="GPUs per replica.")
    cpus: float = Field(1, ge=0, description="CPUs per replica that Ray reserves; INKSTREAM_THREADS limits their use.")
    fronts: int = Field(1, ge=1, description="Replicas of the gateway; a stream can resume only at its own gateway.")
    resends: int = Field(2, ge=0, le=10, description="Retries of a request on another replica after one was lost.")
    port: int = Field(8001, ge=0, le=65535, description="Port of the gateway on INKSTREAM_HOST; 0: Ray's proxies only.")

    @model_validator(mode="after")
    def _check_replicas(self) -> Placement:
        if self.most_replicas and self.most_replicas < self.replicas:
            raise ValueError(f"most_replicas ({self.most_replicas}) is below replicas ({self.replicas})")
        if self.fronts > 1 and self.port:
            raise ValueError(
                f"fronts ({self.fronts}) cannot share a port: set port=0 and use the address of Ray's proxies"
            )
        return self


class EngineReplica:
    """One replica of the service: the application of `inkstream serve`, without its socket."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Ray awaits it
        """Loads the model; Ray sends requests once this returns."""
        logs.set_up(settings.log_level, logs.resolve_format(settings.log_format))
        self._app = create_app(settings, tracing=open_tracing(settings))
        self._drain_timeout = settings.drain_timeout
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        self._failure = asyncio.ensure_future(self._app.state.service.wait_stopped())
        while not self._is_ready():
            self._check()
            await asyncio.sleep(0.1)
        self._server = ReplicaServer(self._app, serve.get_replica_context().replica_id.unique_id)
        self._address = await self._server.start(get_node_ip_address())

    async def address(self) -> Address:
        """Where the gateways send their requests."""
        return self._address

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Ray passes to desired_replicas(); it does not see the requests itself."""
        return {_OPEN_REQUESTS: self._server.n_open}

    async def check_health(self) -> None:
        """Raises once the service has failed permanently, so that Ray replaces it; engine restarts are not failures."""
        self._check()

    async def __del__(self) -> None:
        """Stops the service once the open responses have ended; longer ones continue on another replica."""
        await self._server.drain(self._drain_timeout)
        await self._lifespan.__aexit__(None, None, None)

    def _check(self) -> None:
        if self._failure.done():
            raise RuntimeError(str(self._failure.result()))

    def _is_ready(self) -> bool:
        try:
            self._app.state.service.require_ready()
        except NotReady:
            return False
        return True


class FrontReplica:
    """The gateway: on a port of its own, and as Ray Serve's ingress, whose proxy adds a hop to every token."""

    async def __init__(self, settings: Settings, engine: DeploymentHandle, placement: Placement) -> None:  # type: ignore[misc]
        """Listens once this returns."""
        self._pool, self._engine = ReplicaPool(), engine
        self._looking = asyncio.create_task(self._look_for_replicas())
        connections, resends = ConnectionLimits(connection_limits(settings)), placement.resends
        self._gateway = Gateway(settings, self._pool, max_retries=resends, best_effort=connections.best_effort)
        self._server: uvicorn.Server | None = None
        if placement.port:
            listener = bind(settings.model_copy(update={"port": placement.port}))
            self._server = uvicorn.Server(_http_config(self._gateway, connections, settings))
            self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    def __serve_build_asgi_app__(self) -> Gateway:
        return self._gateway

    async def __del__(self) -> None:
        """Ray has waited for the requests of its own proxies; this waits for the others."""
        if self._server:
            self._server.should_exit = True
            await self._serving
        self._looking.cancel()

    async def _look_for_replicas(self) -> None:
        """Ray pushes its list of replicas to the handle, and this asks each of them for its address."""
        known: frozenset[Address] = frozenset()
        while True:
            try:
                found, n_silent = await _addresses(self._engine)
                known = known | found if n_silent else found
                self._pool.update(known)
            except Exception:  # this task is never awaited, and must go on
                _log.exception("the replicas could not be listed")
            await asyncio.sleep(_LOOK_SECONDS)


async def _addresses(engine: DeploymentHandle) -> tuple[frozenset[Address], int]:
    """The addresses of the replicas that Ray sends requests to, and how many replicas did not answer in time."""
    try:
        # Ray's public API returns nothing until the last replica has responded, and nothing at all if one hangs.
        results: list[Any] = await engine.broadcast("address")._fetch_replica_results_async()
    except DeploymentUnavailableError:
        return frozenset(), 0
    tasks = [asyncio.ensure_future(_address(result)) for result in results]
    done, silent = await asyncio.wait(tasks, timeout=_LOOK_SECONDS) if tasks else (set(), set())
    for task in silent:
        task.cancel()
    await asyncio.gather(*silent, return_exceptions=True)
    return frozenset(address for task in done if (address := task.result())), len(silent)


async def _address(result: Any) -> Address | None:
    """From Ray's ReplicaResult; None if the replica is lost."""
    try:
        address: Address = await result.get_async()
        return address
    except asyncio.CancelledError:
        result.cancel()
        task = asyncio.current_task()
        if task and task.cancelling():
            raise
        return None  # Ray raises this for a replica that it stops; this task was not cancelled
    except exceptions.RayError as error:
        _log.warning("a replica did not respond: %s", error)
        return None


def _http_config(gateway: Gateway, connections: ConnectionLimits, settings: Settings) -> uvicorn.Config:
    """HTTP with the limits and deadlines of `inkstream serve`."""
    protocol = cast(type[asyncio.Protocol], partial(HttpProtocol, connections))
    seconds = math.ceil(settings.drain_timeout)
    return uvicorn.Config(
        gateway,
        log_config=None,
        access_log=False,
        server_header=False,
        http=protocol,
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=seconds,
    )


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
    settings = settings.model_copy(update={"weights": settings.weights.absolute()})
    # The gateway handles stream resumption and CORS, so disable both in the replicas.
    engine = _engine(settings.model_copy(update={"resume_seconds": 0.0, "allow_origin": ""}), placement)
    front = serve.deployment(
        serve.ingress()(FrontReplica),
        name="front",
        num_replicas=placement.fronts,
        # Without the head node there is no cluster, so failures of other nodes do not affect the gateway.
        ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
        max_ongoing_requests=settings.max_connections,
        graceful_shutdown_timeout_s=_drain_seconds(settings),
        logging_config={"enable_access_log": False},
    )
    return front.bind(settings, engine, placement)


def _engine(settings: Settings, placement: Placement) -> serve.Application:
    scaling: dict[str, Any] = {"num_replicas": placement.replicas}
    if placement.most_replicas and not settings.replicas:
        raise StartError("INKSTREAM_REPLICAS=auto: autoscaling needs the number of engines of a copy; give a number")
    if placement.most_replicas:
        scaling = {
            "autoscaling_config": {
                "min_replicas": placement.replicas,
                "max_replicas": placement.most_replicas,
                "target_ongoing_requests": settings.max_running * settings.replicas,
                "upscale_delay_s": placement.upscale_seconds,
                "downscale_delay_s": placement.downscale_seconds,
                "policy": {"policy_function": desired_replicas},
            }
        }
    deployment = serve.deployment(
        EngineReplica,
        name="engine",
        ray_actor_options={"num_cpus": placement.cpus, "num_gpus": placement.gpus},
        graceful_shutdown_timeout_s=_drain_seconds(settings),
        logging_config={"enable_access_log": False},
        **scaling,
    )
    return deployment.bind(settings)


def desired_replicas(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Ray's autoscaling policy: open requests divided by the target per replica. Ray applies delays and limits."""
    by_replica = (context.aggregated_metrics or {}).get(_OPEN_REQUESTS, {})
    return sum(by_replica.values()) / context.config.get_target_ongoing_requests(), {}


def _drain_seconds(settings: Settings) -> float:
    """Timeout for open requests when Ray removes a replica; longer streams continue on another replica."""
    return settings.drain_timeout + 5
