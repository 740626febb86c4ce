"""What the OpenAPI document says beside what FastAPI finds out by itself. Knows no route's work."""

from __future__ import annotations

from typing import Any

from app.api.schemas import ErrorResponse

_ERRORS = {
    400: "Bad value or combination; `param` names the field.",
    404: "Unknown model or request.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    500: "Our fault; the request id names it in the log.",
    503: "Loading, shutting down, or too many wait already: try again after `Retry-After` seconds.",
}


def declared(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`: the errors it may answer with."""
    return {status: {"model": ErrorResponse, "description": _ERRORS[status]} for status in statuses}
