"""Whether an engine that crashes again and again is worth another start. Pure: no clock, no process."""

from __future__ import annotations

MOST_CRASHES, WINDOW_SECONDS = 3, 600.0
MOST_PARDONS = 8


class RestartPolicy:
    """Counts crashes in a row, between which no engine has delivered anything to anybody.

    A request at whose door a crash can be laid costs a second one before it is refused (crash_recovery.py). That one is
    not counted, and where the next engine then answers our own probe (canary.py), neither is the one before: bad
    requests do not end the service, an engine that can do nothing at all does. So does one that answers nothing but
    probes: eight requests in ten minutes are forgiven where nobody else got anything, the ninth is not.
    """

    def __init__(self) -> None:
        self._crashes: list[float] = []
        self._pardons: list[float] = []
        self._may_pardon = True
        """Whether an engine has done anything since the last one."""

    def record(self, now: float, *, delivered: bool, explained: bool, proven: bool = False) -> bool:
        """Whether this crash is one too many. `delivered`: tokens or scores, in more than one step since the last.

        explained: a request is refused, since this was its second crash. proven: the engine had answered the probe.
        """
        if delivered:
            self._pardons = []
        self._pardons = [at for at in self._pardons if now - at < WINDOW_SECONDS]
        if delivered or (proven and len(self._pardons) < MOST_PARDONS):
            self._crashes, self._may_pardon = [], True
        if explained and self._may_pardon:
            self._pardons.append(now)
            self._may_pardon = False
            return False
        self._crashes = [*self._crashes, now][-MOST_CRASHES:]
        return len(self._crashes) == MOST_CRASHES and now - self._crashes[0] < WINDOW_SECONDS
