"""Access record: the facts of one HTTP request that its log line reports."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.types import Scope

_PLACE = "inkstream_record"


@dataclass(slots=True)
class AccessRecord:
    """Filled while the request is served; owned by app/http/request_log.py."""

    request_id: str
    status: int = 0
    """0 until a response starts."""
    key: str | None = None
    """The name of the tenant's key."""
    outcome: str | None = None
    """How it ended, in one of a few fixed words: a finish_reason, or the type or code of an error."""
    facts: Callable[[], Mapping[str, Any]] | None = None
    """Asked at the end: counts and milliseconds of a completion, and its outcome."""
    refusal: tuple[int, str] | None = None
    """Status and code of an error that the connection sent itself; the application only sees a disconnect."""

    @classmethod
    def begin_in(cls, scope: Scope) -> AccessRecord:
        """Returns the record of this scope, or stores a new one with a new request id."""
        if _PLACE not in scope:
            scope[_PLACE] = cls(new_request_id())
        record: AccessRecord = scope[_PLACE]
        return record


def new_request_id() -> str:
    """An unguessable request id."""
    return f"req-{secrets.token_hex(12)}"


def record_of(request: Request) -> AccessRecord:
    """The record of this request."""
    record: AccessRecord = request.scope[_PLACE]
    return record
