"""Restart policy: when an engine that keeps crashing is given up."""

from __future__ import annotations

TOKENS_TO_CLEAR = 2
"""Tokens of a request, generated or scored since it was sent, that show that it does not crash the engine. After one
alone, no decode step has run yet."""
MAX_CRASHES, WINDOW_SECONDS = 3, 600.0
MAX_FORGIVEN = 8


class RestartPolicy:
    """Counts consecutive crashes between which no engine delivered anything to a client.

    A request that crashes the engine causes a second crash before it is refused. That second crash is not counted, and
    if the next engine then answers the canary request, neither is the first: bad requests do not end the service, but
    an engine that never works does. So does an engine that answers only canary requests: while no client gets anything,
    eight refused requests in ten minutes are forgiven, the ninth is not.
    """

    def __init__(self) -> None:
        self._crashes: list[float] = []
        self._forgiven: list[float] = []
        self._can_forgive = True
        """Whether an engine has delivered anything since the last forgiven crash."""

    def record(self, now: float, *, delivered: bool, is_refused: bool, canary_answered: bool = False) -> bool:
        """Returns whether to stop restarting. `delivered`: two or more steps since the last crash had tokens or scores.

        is_refused: a request is refused for its second crash. canary_answered: the engine answered the canary request.
        """
        if delivered:
            self._forgiven = []
        self._forgiven = [at for at in self._forgiven if now - at < WINDOW_SECONDS]
        if delivered or (canary_answered and len(self._forgiven) < MAX_FORGIVEN):
            self._crashes, self._can_forgive = [], True
        if is_refused and self._can_forgive:
            self._forgiven.append(now)
            self._can_forgive = False
            return False
        self._crashes = [*self._crashes, now][-MAX_CRASHES:]
        return len(self._crashes) == MAX_CRASHES and now - self._crashes[0] < WINDOW_SECONDS
