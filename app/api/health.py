"""Health, readiness, the model list and their schemas."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from app.api.dependencies import MetricsDep, ServiceDep, check_model
from app.api.metrics import CONTENT_TYPE
from app.api.openapi import declared
from app.common.errors import NotReady
from app.http.auth import public
from app.http.errors import ApiError
from app.serving.service import Service


class Model(BaseModel):
    """The model that is served."""

    id: str = Field(description="Name of the model: that of the weights directory.")
    object: Literal["model"] = Field(description="Type of the object.")
    created: int = Field(description="When the service started, as a Unix time.")
    owned_by: str = Field(description="Always inkstream.")
    max_model_len: int = Field(description="Context length in tokens, prompt and completion together.")
    n_params: int = Field(description="Number of parameters.")
    n_vocab: int = Field(description="Size of the vocabulary: all token ids are below it.")
    has_encoder: bool = Field(description="Whether the model has an encoder, which reads `source`.")
    dtype: str = Field(description="Number format of weights and cache.")
    device: str = Field(description="Device that the model runs on.")
    numerics: str = Field(description="Backend (torch or native kernels) and number format.")
    weights_version: str = Field(description="SHA-256 of the weights.")
    sampling_defaults: dict[str, float] = Field(
        description="Defaults of POST /complete for fields that a request leaves out."
    )


class ModelList(BaseModel):
    """Response of GET /v1/models."""

    object: Literal["list"] = Field(description="Type of the object.")
    data: list[Model] = Field(description="The model.")


class Health(BaseModel):
    """Response of GET /health."""

    status: str = Field(description="live, ready or not ready.")
    phase: str | None = Field(None, description="Current phase of the service.")
    reason: str | None = Field(None, description="Why the service is not ready, if all recent requests failed.")


_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"model": Health, "description": "Loading, failing or shutting down."}
}
_METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
router = APIRouter(tags=["operations"])


@router.head("/health/live", include_in_schema=False)
@router.get("/health/live", response_model=Health, response_model_exclude_none=True)
@public
async def live() -> dict[str, str]:
    """200 as long as the process responds."""
    return {"status": "live"}


@router.head("/health", include_in_schema=False)
@router.head("/health/ready", include_in_schema=False)
@router.get("/health", name="health", response_model=Health, responses=_NOT_READY)
@router.get("/health/ready", response_model=Health, responses=_NOT_READY)
@public
async def ready(service: ServiceDep) -> JSONResponse:
    """200 when the service accepts completions; 503 during startup, while draining, and while all requests fail."""
    try:
        service.require_ready()
    except NotReady as error:
        headers = {"Retry-After": str(error.retry_after)}
        return JSONResponse({"status": "not ready", "phase": service.phase}, status_code=503, headers=headers)
    if problem := service.failures.problem:
        content = {"status": "not ready", "phase": "failing", "reason": problem}
        return JSONResponse(content, status_code=503, headers={"Retry-After": "2"})
    return JSONResponse({"status": "ready", "phase": "ready"})


@router.get("/metrics", response_class=Response, responses={**_METRICS, **declared(401)})
async def metrics(metrics: MetricsDep) -> Response:
    """Prometheus text."""
    return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE})


@router.head("/metrics", include_in_schema=False)
async def metrics_head() -> Response:
    """Some benchmark clients check whether metrics are available."""
    return Response(headers={"Content-Type": CONTENT_TYPE})


@router.get("/v1/models", response_model=ModelList, responses=declared(401, 503))
async def models(service: ServiceDep) -> dict[str, Any]:
    """The served model."""
    return {"object": "list", "data": [_facts(service)]}


@router.get("/v1/models/{model_id:path}", response_model=Model, responses=declared(401, 404, 503))
async def model(model_id: str, service: ServiceDep) -> dict[str, Any]:
    """Information about one model."""
    if not model_id:
        raise ApiError(
            404, "the model name is missing: GET /v1/models returns it", param="model", code="model_not_found"
        )
    check_model(model_id, service)
    return _facts(service)


def _facts(service: Service) -> dict[str, Any]:
    ready, _ = service.require_ready()
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "inkstream",
        "max_model_len": ready.context,
        "n_params": ready.n_params,
        "n_vocab": ready.vocab_size,
        "has_encoder": ready.has_encoder,
        "dtype": ready.dtype,
        "device": ready.device,
        "numerics": ready.numerics,
        "weights_version": ready.weights_version,
        "sampling_defaults": ready.sampling_defaults,
    }
