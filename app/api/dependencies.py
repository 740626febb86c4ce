"""Dependencies of routes: the service and its parts, parsing of request bodies, the version header."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

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
from app.serving.service import Service

_Body = TypeVar("_Body", bound=BaseModel)
_T = TypeVar("_T")


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


def version_header(version: Version) -> dict[str, str]:
    """The response header that names the weights and adapters."""
    return {"X-Weights-Version": version.key}
