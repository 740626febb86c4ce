"""What the engine's loop begins with: an engine that can take requests, or the reason why there is none. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from app.common.ipc import Ready
from app.engine.execution.engine import Engine
from app.engine.guided.grammar_compile_queue import PreparesGrammars


class EngineStartError(ValueError):
    """The configuration does not work; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """An engine that can take requests."""

    engine: Engine
    guides: PreparesGrammars
    ready: Ready
