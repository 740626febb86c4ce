"""Measured throughput of the request queue, which estimates how long a request will wait.

An empty queue says nothing about throughput, since requests are admitted at once. So the estimate counts only the time
after reports with a backlog, and the work that left the queue in that time; both decay over half a minute.
"""

from __future__ import annotations

import math

_DECAY_SECONDS = 30.0
_PRIOR_REQUESTS, _PRIOR_INTERVAL = 2, 0.1
"""Prior of the estimate: requests, and seconds between two of them, before anything is measured."""
_MIN_REQUESTS = 8


class ThroughputEstimate:
    """Measured throughput of the queue, in any unit of work."""

    def __init__(self) -> None:
        self._work = self._seconds = 0.0
        self._backlog_since: float | None = None

    @property
    def has_backlog(self) -> bool:
        """Whether requests waited at the last report: new ones do not start at once."""
        return self._backlog_since is not None

    def record(self, left: float, now: float, *, has_backlog: bool) -> None:
        """Records the work that left the queue since the last call, and whether requests still wait."""
        if self._backlog_since is not None:
            seconds = max(0.0, now - self._backlog_since)
            decay = math.exp(-seconds / _DECAY_SECONDS)
            self._work = self._work * decay + left
            self._seconds = self._seconds * decay + seconds
        self._backlog_since = now if has_backlog else None

    def seconds_for(self, work: float, mean_work: float, now: float) -> float:
        """Estimated seconds until `work` has left the queue; an average request has `mean_work`.

        A prior assumes that a few requests left quickly, with a weight that decays: so there is an estimate before the
        first measurement, and the estimate for a stalled engine grows with each second but stays finite.
        """
        prior = _PRIOR_REQUESTS * max(0.05, 1 - self._seconds / _DECAY_SECONDS)
        return work * (self._measured(now) + prior * _PRIOR_INTERVAL) / (self._work + prior * mean_work)

    def is_reliable(self, mean_work: float, seconds: float, now: float) -> bool:
        """Whether the estimate justifies a refusal: enough requests have left, or none has for `seconds`."""
        return self.has_backlog and (self._work >= _MIN_REQUESTS * mean_work or self._measured(now) >= seconds)

    def _measured(self, now: float) -> float:
        stalled = 0.0 if self._backlog_since is None else max(0.0, now - self._backlog_since)
        return self._seconds + stalled
