"""What the engine's loop begins with: an engine that can take requests, or the reason why there is none. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from app.engine.engine import Engine
from app.engine.frames import Ready
from app.engine.types import Request


class StartError(ValueError):
    """The configuration does not work; the message says what to change."""


class PreparesGuides(Protocol):
    """What makes ready whatever a guided request needs before its first step; app/engine/guides.py, or a fake one."""

    @property
    def n_prepared(self) -> int:
        """Guides that are kept for requests that have not begun."""
        ...

    def prepare(self, request: Request) -> None:
        """Compiles a request's guide, in any thread."""
        ...

    def forget(self, request_id: str) -> None:
        """Nobody needs this request's guide any more."""
        ...


@dataclass(frozen=True, slots=True)
class Assembled:
    """An engine that can take requests."""

    engine: Engine
    guides: PreparesGuides
    ready: Ready
