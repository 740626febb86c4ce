"""Health, readiness, the model list and their schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.dependencies import check_model, metrics_of, service_of
from app.api.key_usage import visible_to
from app.api.openapi import declared
from app.api.route_documentation import documented
from app.api.schemas import ContextLength, VocabularySize, WeightsRevision, WeightsVersion
from app.common.errors import NotReady
from app.http.auth import public, tenant_of
from app.http.errors import ApiError
from app.http.request_log import record_of, respond, routine
from app.http.response_model import SCHEMA_PATH, ResponseModel, json_response
from app.serving.service import Service
from model.tokenizer.infill import infill_tokens


class Model(ResponseModel):
    """The model that is served."""

    id: Annotated[str, "org/name of the Hugging Face Hub; else the name in manifest.json, or the weights directory's."]
    object: Annotated[Literal["model"], "Type of the object."]
    created: Annotated[int, "When the service started, as a Unix time."]
    owned_by: Annotated[str, "Always inkstream."]
    max_model_len: ContextLength
    n_params: Annotated[int, "Number of parameters."]
    n_vocab: VocabularySize
    has_encoder: Annotated[bool, "Whether the model has an encoder, which reads `source`."]
    has_infill: Annotated[bool, "Whether the vocabulary has fill-in-the-middle tokens, which `suffix` needs."]
    dtype: Annotated[str, "Number format of steps and cache; `numerics` has that of weights, too."]
    device: Annotated[str, "Device that the model runs on."]
    numerics: Annotated[str, "Backend (torch or native kernels) and number format."]
    weights_version: WeightsVersion
    sampling_defaults: Annotated[dict[str, float], "Defaults of POST /complete for fields that a request leaves out."]
    compare_origins: Annotated[list[str], "Other services that the page may compare with this one (--compare-origin)."]
    weights_revision: WeightsRevision = None


class ModelList(ResponseModel):
    """Response of GET /v1/models."""

    object: Annotated[Literal["list"], "Type of the object."]
    data: Annotated[list[Model], "The model."]


class Health(ResponseModel):
    """Response of GET /health."""

    status: Annotated[str, "live, ready or not ready."]
    phase: Annotated[str | None, "Current phase of the service."] = None
    reason: Annotated[str | None, "Why the service is not ready, if all recent requests failed."] = None


_DOWNLOADING = "the model is downloading: try again in a moment"
_DOWNLOAD_SECONDS = "5"
_DOWNLOAD_PAGE = (
    f'<!doctype html><meta http-equiv="refresh" content="{_DOWNLOAD_SECONDS}"><title>inkstream</title><p>{_DOWNLOADING}'
)


class DownloadGate:
    """ASGI middleware: until the model is downloaded there is no service, and all but liveness probes get 503."""

    def __init__(self, app: ASGIApp, is_open: Callable[[], bool]) -> None:
        self.app, self._is_open = app, is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open() or scope["path"] == "/health/live":
            await self.app(scope, receive, send)
            return
        request, headers = Request(scope), {"Retry-After": _DOWNLOAD_SECONDS}
        record_of(request).is_during_start = True
        if scope["path"] in ("/health", "/health/ready"):
            response = json_response(Health("not ready", "downloading"), 503, headers)
        elif scope["path"] == "/" and "text/html" in request.headers.get("accept", ""):
            response = Response(_DOWNLOAD_PAGE, 503, headers, media_type="text/html")
        else:
            response = respond(request, ApiError(503, _DOWNLOADING, headers=headers))
        await response(scope, receive, send)


_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {
        "content": {"application/json": {"schema": {"$ref": SCHEMA_PATH.format(model=Health.__name__)}}},
        "description": "Loading, failing or shutting down.",
    }
}
_METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
router = APIRouter(tags=["operations"])


@router.head("/health/live", include_in_schema=False)
@router.get("/health/live", openapi_extra=documented(Health))
@public
@routine
async def live(request: Request) -> Response:  # noqa: ARG001 - DirectRoutes
    """200 as long as the process responds."""
    return json_response(Health("live"))


@router.head("/health", include_in_schema=False)
@router.head("/health/ready", include_in_schema=False)
@router.get("/health", name="health", openapi_extra=documented(Health), responses=_NOT_READY)
@router.get("/health/ready", openapi_extra=documented(Health), responses=_NOT_READY)
@public
@routine
async def ready(request: Request) -> Response:
    """200 when the service accepts completions; 503 during startup, while draining, and while all requests fail."""
    service = service_of(request)
    try:
        service.require_ready()
    except NotReady as error:
        return json_response(Health("not ready", service.phase), 503, {"Retry-After": str(error.retry_after)})
    if problem := service.failures.problem:
        return json_response(Health("not ready", "failing", problem), 503, {"Retry-After": "2"})
    return json_response(Health("ready", "ready"))


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=Response, responses={**_METRICS, **declared(401)})
@routine
async def metrics(request: Request) -> Response:
    """Prometheus text, or OpenMetrics if the Accept header asks for it."""
    page, content_type = await metrics_of(request).page(request.headers.get("accept", ""))
    if not (tenant := tenant_of(request)).reads_usage:
        page = visible_to(tenant.name, page)
    return Response(page, headers={"Content-Type": content_type, "Vary": "Accept"})


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", openapi_extra=documented(ModelList), responses=declared(401, 503))
async def models(request: Request) -> Response:
    """The served model."""
    return json_response(ModelList("list", [_model(service_of(request))]))


@router.head("/v1/models/{model_id:path}", include_in_schema=False)
@router.get("/v1/models/{model_id:path}", openapi_extra=documented(Model), responses=declared(401, 404, 503))
async def model(request: Request, model_id: str) -> Response:
    """Information about one model."""
    if not model_id:
        raise ApiError(
            404, "the model name is missing: GET /v1/models returns it", param="model", code="model_not_found"
        )
    check_model(model_id, service_of(request))
    return json_response(_model(service_of(request)))


def _model(service: Service) -> Model:
    ready, tokenizer = service.require_ready()
    return Model(
        id=service.model_name,
        object="model",
        created=service.instance.created,
        owned_by="inkstream",
        max_model_len=ready.context,
        n_params=ready.n_params,
        n_vocab=ready.vocab_size,
        has_encoder=ready.has_encoder,
        has_infill=infill_tokens(tokenizer) is not None,
        dtype=ready.dtype,
        device=ready.device,
        numerics=ready.numerics,
        weights_version=ready.model_version.key,
        sampling_defaults=dict(ready.sampling_defaults),
        compare_origins=list(service.settings.compared_origins),
        weights_revision=service.instance.revision,
    )
