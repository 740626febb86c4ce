"""Access record: what the log line of one HTTP request reports."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.types import Scope

_SCOPE_KEY = "inkstream_record"


@dataclass(slots=True)
class AccessRecord:
    """Filled while the request is handled; owned by app/http/request_log.py."""

    request_id: str
    status: int = 0
    """0 until a response starts."""
    key: str | None = None
    """Name of the tenant's API key."""
    outcome: str | None = None
    """How the request ended: a finish_reason, or the type or code of an error."""
    log_fields: Callable[[], Mapping[str, Any]] | None = None
    """Called at the end: counts and milliseconds of a completion, and its outcome."""
    early_error: tuple[int, str] | None = None
    """Status and code of an error that the connection sent itself; the application only saw a disconnect."""

    @classmethod
    def get_or_create(cls, scope: Scope) -> AccessRecord:
        """Returns the record of this scope, or stores a new one with a new request id."""
        if _SCOPE_KEY not in scope:
            scope[_SCOPE_KEY] = cls(new_request_id())
        record: AccessRecord = scope[_SCOPE_KEY]
        return record


def new_request_id() -> str:
    """An unguessable request id."""
    return f"req-{secrets.token_hex(12)}"


def record_of(request: Request) -> AccessRecord:
    """The record of this request."""
    record: AccessRecord = request.scope[_SCOPE_KEY]
    return record
