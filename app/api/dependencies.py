"""Dependencies of routes: direct calls, the service and its parts, parsing of request bodies, the version header."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cached_property, partial
from inspect import signature
from typing import Any, TypeVar, cast

from fastapi import Request
from fastapi.routing import APIRoute, APIRouter
from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from app.access.worker_turns import WorkAccount
from app.api.metrics import Metrics
from app.api.resume_store import ResumeStore
from app.common.errors import RateLimitExceeded
from app.common.model_version import Version
from app.http.auth import tenant_of
from app.http.disconnect import until_disconnect
from app.http.errors import ApiError, from_validation
from app.http.incoming_bodies import IncomingBodies
from app.http.request_body import json_body, utf8_json
from app.http.response_model import ResponseModel, json_schema
from app.serving.service import Service

_Body = TypeVar("_Body", bound=BaseModel)
_T = TypeVar("_T")


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


def service_of(request: Request) -> Service:
    """The service."""
    service: Service = request.app.state.service
    return service


def metrics_of(request: Request) -> Metrics:
    """The metrics of the service."""
    metrics: Metrics = request.app.state.metrics
    return metrics


def resume_store_of(request: Request) -> ResumeStore:
    """The resumable streams of the service."""
    resume_store: ResumeStore = request.app.state.resume_store
    return resume_store


class RepeatQuotas:
    """Counts requests that get another one's response (app/http/idempotency.py) against the quota of their key."""

    def check(self, request: Request) -> None:
        """Requires that the key has a request left."""
        service_of(request).admission.check_requests(tenant_of(request))

    def repeated(self, request: Request) -> AbstractContextManager[object]:
        """Counts a request that gets a response again."""
        return service_of(request).admission.count_request(tenant_of(request))

    def refused(self, request: Request) -> None:
        """Counts a request that gets an error."""
        service_of(request).admission.count_refused(tenant_of(request))


def check_model(name: str | None, service: Service) -> None:
    """Raises ApiError 404 for an unknown model."""
    if name and not service.is_model_name(name):
        message = f"unknown model {name[:100]!r}: the served model is {service.model_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


async def read_body(request: Request, model: type[_Body]) -> _Body:
    """Reads a JSON body within the service's limit, parses it as `model`.

    Raises ApiError 400, 413, 415, which counts as a request of the key; RateLimitExceeded, before it reads anything.
    FastAPI's own parsing would read the whole body first, and accept NaN and unlimited nesting.
    """
    try:
        return await _read_body(request, model)
    except RateLimitExceeded:
        metrics_of(request).record_rejected("quota")
        raise
    except ApiError:
        metrics_of(request).record_rejected("invalid")
        service_of(request).admission.count_refused(tenant_of(request))
        raise


async def _read_body(request: Request, model: type[_Body]) -> _Body:
    service = service_of(request)
    service.admission.check_requests(tenant_of(request))
    account = WorkAccount(tenant_of(request).cache_namespace)
    bodies: IncomingBodies = request.app.state.incoming_bodies
    reading = json_body(request, service.settings.max_body_bytes, bodies)
    async with reading as body, service.loop_share.parsing(body, account):
        try:
            return model.model_validate_json(utf8_json(body))
        except ValidationError as error:
            raise from_validation(error, model.model_fields) from None


async def while_connected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Returns the result of `work`; if the client disconnects first, cancels it and raises ApiError 499."""
    if (result := await until_disconnect(work, request.receive)) is None:
        raise ApiError(499, "the client has disconnected")
    return result


def documented(
    response: type[ResponseModel],
    body: type[BaseModel] | None = None,
    examples: Mapping[str, Any] | None = None,
    chunk: type[ResponseModel] | None = None,
) -> dict[str, Any]:
    """A route's openapi_extra: its response, the body that read_body() parses, and the data-only frames of its stream.

    Not as FastAPI's response_model, which makes FastAPI build a validator. `examples` maps titles to bodies that
    the service accepts as they are.
    """
    return cast("dict[str, Any]", _LazyMapping(partial(_describe, response, body, examples or {}, chunk)))


class _LazyMapping(Mapping[str, Any]):
    """Made when the OpenAPI document is, not at import, where the schemas of all bodies delayed the start."""

    def __init__(self, make: Callable[[], Mapping[str, Any]]) -> None:
        self._make = make

    @cached_property
    def _content(self) -> Mapping[str, Any]:
        return self._make()

    def __getitem__(self, key: str) -> Any:
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def __bool__(self) -> bool:
        return True  # without making it


def _describe(
    response: type[ResponseModel],
    body: type[BaseModel] | None,
    examples: Mapping[str, Any],
    chunk: type[ResponseModel] | None,
) -> dict[str, Any]:
    answers = {"application/json": {"schema": json_schema(response)}}
    if chunk:
        answers["text/event-stream"] = {"schema": json_schema(chunk)}
    described: dict[str, Any] = {"responses": {"200": {"content": answers}}}
    if body:
        content = {
            "schema": json_schema(body),
            "examples": {title: {"value": value} for title, value in examples.items()},
        }
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    return described


def version_header(version: Version) -> dict[str, str]:
    """The response header that names the weights and adapters."""
    return {"X-Weights-Version": version.key}
