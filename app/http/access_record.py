"""What is noted of one HTTP request for its line in the log."""

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
    """0 until an answer begins."""
    key: str | None = None
    """The name of the caller's key."""
    outcome: str | None = None
    """How it ended, in one of a few fixed words: a finish_reason, or the type or code of an error."""
    facts: Callable[[], Mapping[str, Any]] | None = None
    """Asked at the end: counts and milliseconds of a completion, and its outcome."""
    refusal: tuple[int, str] | None = None
    """Status and code of what the connection answered in the application's place, which only hears that nobody reads.
    """

    @classmethod
    def begin_in(cls, scope: Scope) -> AccessRecord:
        """Whoever has the scope has the record: the one that is there, or a new one with a new id."""
        if _PLACE not in scope:
            scope[_PLACE] = cls(new_request_id())
        record: AccessRecord = scope[_PLACE]
        return record


def new_request_id() -> str:
    """One that nobody can guess."""
    return f"req-{secrets.token_hex(12)}"


def record_of(request: Request) -> AccessRecord:
    """The record of this request."""
    record: AccessRecord = request.scope[_PLACE]
    return record
