"""What the engine's loop begins with: an engine that can take requests, or the reason why there is none. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from app.common.ipc import Ready
from app.common.types import Request
from app.engine.execution.engine import Engine
from app.engine.guided.grammar_workers import Job


class EngineStartError(ValueError):
    """The configuration does not work; the message says what to change."""


class PreparesGrammars(Protocol):
    """What the loop asks of app/engine/guided/grammar_tracker.py."""

    @property
    def n_prepared(self) -> int:
        """Grammars that are kept for requests that have not begun."""
        ...

    def prepare(self, request: Request) -> Job:
        """Starts to compile a request's grammar."""
        ...

    def forget(self, request_id: str) -> None:
        """Drops a request's grammar; no error where there is none."""
        ...

    def take_work(self) -> tuple[tuple[str, float], ...]:
        """For StepReport.work."""
        ...


@dataclass(frozen=True, slots=True)
class Assembled:
    """An engine that can take requests."""

    engine: Engine
    guides: PreparesGrammars
    ready: Ready
