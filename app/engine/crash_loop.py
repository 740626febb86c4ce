"""Whether an engine that crashes again and again is worth another start. Pure: no clock, no process."""

from __future__ import annotations

MOST_CRASHES, WINDOW_SECONDS = 3, 600.0


class CrashLoop:
    """Counts crashes in a row, between which no engine has delivered anything to anybody.

    A request at whose door a crash can be laid costs a second one before it is refused (quarantine.py). That one is not
    counted, once in a row: a bad request does not end the service, an engine that can do nothing at all does.
    """

    def __init__(self) -> None:
        self._crashes: list[float] = []
        self._pardoned = False

    def record(self, now: float, *, delivered: bool, explained: bool) -> bool:
        """Whether this crash is one too many. `delivered`: tokens or scores, in more than one step since the last.

        explained: a request is refused, since this was its second crash.
        """
        if delivered:
            self._crashes, self._pardoned = [], False
        if explained and not self._pardoned:
            self._pardoned = True
            return False
        self._crashes = [*self._crashes, now][-MOST_CRASHES:]
        return len(self._crashes) == MOST_CRASHES and now - self._crashes[0] < WINDOW_SECONDS
