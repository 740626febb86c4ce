"""What an engine's client tells whoever has several of them (app/engine_client/engine_pool.py). No pipe, no torch."""

from __future__ import annotations

from typing import Protocol


class EngineGone(Exception):
    """An engine does not come back; `exit_code` is what the process should end with where there is no other."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class PoolEvents(Protocol):
    """Knows the other engines. `place` is which engine it is that tells."""

    def on_ready(self, place: int) -> None:
        """It takes requests."""
        ...

    def on_room(self, place: int) -> None:
        """It has ended something, or has nothing to do: it may have places that nobody there waits for."""
        ...

    def on_crash(self, place: int) -> None:
        """Its process is gone and another one will come."""
        ...

    def on_gone(self, place: int, reason: EngineGone) -> None:
        """No process will come any more."""
        ...
