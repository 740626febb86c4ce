"""The OpenAPI document: FastAPI's, plus bodies, errors and streams."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI

from app.api.schemas import EVENTS
from app.common.threaded_result import ThreadedResult
from app.http.errors import ErrorResponse
from app.http.response_model import SCHEMA_PATH, ResponseModel, json_schema
from app.http.static_content import StaticContent

TAGS = [
    {"name": "completion", "description": "Text completion and scoring."},
    {"name": "tokens", "description": "Conversion between text and tokens."},
    {"name": "operations", "description": "Model information, health and metrics."},
]
_ERRORS = {
    400: "Invalid value, or combination of values; `param` names the field.",
    401: "Missing or invalid API key.",
    403: "Not allowed, for example because of the origin.",
    404: "Unknown model, unknown request, or a request of another key.",
    405: "Method not allowed.",
    409: "The request with this `Idempotency-Key` is still running: try again after `Retry-After` seconds. Or `resume` "
    "does not fit what this service computes (`receipt_mismatch`, `resume_diverged`).",
    413: "The body is too large.",
    415: "The Content-Type is not JSON.",
    429: "The key's rate limit is exceeded: try again after `Retry-After` seconds.",
    500: "Internal error; look up the request id in the server's log.",
    503: "Loading, shutting down, or the queue is full: try again after `Retry-After` seconds.",
    504: "The request's deadline passed before its first token.",
}
_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "A new text for each request. Sent again with it, a request gets the response of the first one.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}
_KEY = {"type": "http", "scheme": "bearer", "description": "API key, if the service is configured with keys."}
_RETRY_AFTER = {"description": "Seconds to wait before the next attempt.", "schema": {"type": "integer"}}
_CHUNKS = """One JSON object or, where `stream` is true, a stream of frames without names: `data: ` and one line of
JSON with the new part of a choice; an error as `{"error": ...}`; `data: [DONE]` is the last."""
_STREAM_EXAMPLE = """id: req-1:0
event: start
data: {"id": "req-1", "model": "period-8.7m", "seed": 7, "prompt_tokens": 4, "cached_tokens": 0, ...}

id: req-1:1
event: token
data: {"index": 0, "text": " there was"}

id: req-1:2
event: done
data: {"choices": [{"index": 0, "finish_reason": "length", "stop_reason": null}], "usage": {...}, ...}

"""


def declared(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: the errors that it may return."""
    # Not {"model": ErrorResponse}: at import FastAPI would build a validator for each of about a hundred.
    content = {"application/json": {"schema": {"$ref": SCHEMA_PATH.format(model=ErrorResponse.__name__)}}}
    return {
        status: {
            "description": _ERRORS[status],
            "content": content,
            **({"headers": {"Retry-After": _RETRY_AFTER}} if status in (409, 429, 503) else {}),
        }
        for status in statuses
    }


class DescribedApp(FastAPI):
    """FastAPI with a complete OpenAPI document."""

    def __init__(self, *, longest_deadline_ms: int, **others: Any) -> None:
        """`longest_deadline_ms` is the server's limit; a request above the limit gets a 400."""
        super().__init__(
            generate_unique_id_function=lambda route: route.name,
            openapi_url=None,  # app/api/static_pages.py has these routes
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            **others,
        )
        self._longest_deadline_ms = longest_deadline_ms
        self.openapi_content = ThreadedResult(self._content)
        """The document as GET /openapi.json returns it; describing all routes takes 0.2 to 0.6 s."""

    def _content(self) -> StaticContent:
        return StaticContent(json.dumps(self.openapi()).encode(), "application/json")

    def openapi(self) -> dict[str, Any]:
        """The document, cached."""
        if self.openapi_schema is None:
            document = _described(super().openapi())
            _limit_deadlines(document["components"]["schemas"], self._longest_deadline_ms)
            self.openapi_schema = document
        return self.openapi_schema


def _limit_deadlines(schemas: dict[str, Any], longest_ms: int) -> None:
    """Replaces the upper bound of deadline fields with this server's limit."""
    for schema in schemas.values():
        for kind in schema.get("properties", {}).get("deadline_ms", {}).get("anyOf", ()):
            if kind.pop("exclusiveMaximum", None):
                kind["maximum"] = longest_ms


def _described(document: dict[str, Any]) -> dict[str, Any]:
    schemas = document["components"]["schemas"]
    document["components"]["securitySchemes"] = {"key": _KEY}
    document["servers"] = [{"url": "/", "description": "This service."}]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            responses.pop("422", None)  # FastAPI declares 422 for validation errors, but this service sends 400
            content = responses["200"].get("content", {})
            if "requestBody" in operation:
                _move_schema(operation["requestBody"]["content"]["application/json"], schemas)
            if "401" in responses:
                operation["security"] = [{"key": []}, {}]  # {}: without a key, if no keys are configured
            if method == "post":
                operation["parameters"] = [*operation.get("parameters", ()), _IDEMPOTENCY_KEY]
                responses["409"] = {**responses["400"], **declared(409)[409]}
            if "application/json" in content:
                _move_schema(content["application/json"], schemas)
            if (path == "/complete" and method == "post") or path.endswith("/events"):
                _describe_stream(responses["200"])
            elif "text/event-stream" in content:
                responses["200"]["description"] = _CHUNKS
                _describe_chunks(content["text/event-stream"], schemas)
    streamed_or_error: list[type[ResponseModel]] = [*EVENTS.values(), ErrorResponse]
    for model in streamed_or_error:
        _move_schema({"schema": json_schema(model)}, schemas)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    document["components"]["schemas"] = dict(sorted(schemas.items()))
    return document


def _move_schema(content: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Moves an inline schema of dependencies.documented() into the named components; returns the reference to it."""
    schema = content["schema"]
    if "title" in schema:
        schemas |= schema.pop("$defs", {})
        schemas[schema["title"]] = schema
        content["schema"] = {"$ref": SCHEMA_PATH.format(model=schema["title"])}
    reference: dict[str, Any] = content["schema"]
    return reference


def _describe_stream(response: dict[str, Any]) -> None:
    content = response.setdefault("content", {})
    if not content.get("application/json", {}).get("schema"):
        content.pop("application/json", None)
    lines = [f"- {(model.__doc__ or '').strip()}" for model in EVENTS.values()]
    response["description"] = "\n".join(
        [
            f"{'One JSON object, or a' if content else 'A'} stream of events. Each has an `id`, a name and one line of",
            "JSON in ASCII; exactly one `done` or `error` is the last. Comments (`: ping`) are heartbeats.",
            "",
            *lines,
        ]
    )
    events = [
        _event({"$ref": SCHEMA_PATH.format(model=model.__name__)}, {"id": {"type": "string"}, "event": {"const": name}})
        for name, model in EVENTS.items()
    ]
    content["text/event-stream"] = {"schema": {"anyOf": events}, "example": _STREAM_EXAMPLE}


def _describe_chunks(content: dict[str, Any], schemas: dict[str, Any]) -> None:
    chunk = _move_schema(content, schemas)
    done = {"type": "object", "properties": {"data": {"const": "[DONE]"}}, "required": ["data"]}
    error = {"$ref": SCHEMA_PATH.format(model=ErrorResponse.__name__)}
    content["schema"] = {"anyOf": [_event(chunk, {}), _event(error, {}), done]}


def _event(data_schema: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The schema of one event, its data a JSON string: OpenAPI 3.1 cannot describe an event stream."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": data_schema}
    return {"type": "object", "properties": {**others, "data": data}, "required": [*others, "data"]}
