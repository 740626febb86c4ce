"""The one timer of a connection: whether its client sends what it owes, and reads what it gets. Knows no HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable

from app.common.lazy_timer import LazyTimer
from app.http.flow_control import ConnectionFlowControl


class ConnectionTimeouts:
    """Calls `on_late` once when what expect() asked for has not come, `on_stall` when the client stopped reading."""

    def __init__(self, flow: ConnectionFlowControl, on_late: Callable[[], None], on_stall: Callable[[], None]) -> None:
        self._flow = flow
        self._on_late = on_late
        self._on_stall = on_stall
        self._alarm = LazyTimer(self._look)
        self._due: float | None = None

    def expect(self, seconds: float | None) -> None:
        """The client owes us something by then; nothing with None."""
        self._due = None if seconds is None else time.monotonic() + seconds
        self.look_later()

    def look_later(self) -> None:
        """Rings when the first of the deadlines is over."""
        if dues := [due for due in (self._due, self._flow.write_due) if due is not None]:
            self._alarm.set(min(dues))

    def end(self) -> None:
        """Nothing rings any more."""
        self._alarm.cancel()

    def _look(self) -> None:
        """A deadline may have passed, or been moved."""
        now = time.monotonic()
        if self._flow.has_stalled(now):
            self._on_stall()
            return
        if self._due is not None and now >= self._due:
            self._due = None
            self._on_late()
        self.look_later()
