"""How fast a run is of late, how long it still takes, and its smoothed loss. Knows nothing but what each step tells."""

from __future__ import annotations

from collections import deque

from model.train.progress import Progress

_LOOK_BACK_SECONDS = 60.0
_KEPT = 0.9


class Pace:
    """Looks back over the last minute, so that a machine that slows down shows at once."""

    def __init__(self) -> None:
        self._seen: deque[Progress] = deque()
        self._loss, self._weight = 0.0, 0.0

    def add(self, progress: Progress) -> None:
        """One more step."""
        self._seen.append(progress)
        while len(self._seen) > 2 and progress.seconds - self._seen[1].seconds >= _LOOK_BACK_SECONDS:
            self._seen.popleft()
        self._loss = _KEPT * self._loss + (1 - _KEPT) * progress.loss
        self._weight = _KEPT * self._weight + 1 - _KEPT

    @property
    def loss(self) -> float:
        """The mean of what came, recent steps counting most."""
        return self._loss / self._weight

    @property
    def tokens_per_second(self) -> float:
        """0 after the first step, which also warms up."""
        first, last = self._seen[0], self._seen[-1]
        return (last.tokens - first.tokens) / max(last.seconds - first.seconds, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """None before it can be told."""
        first, last = self._seen[0], self._seen[-1]
        done, seconds = last.fraction - first.fraction, last.seconds - first.seconds
        return seconds * max(0.0, 1 - last.fraction) / done if done > 0 else None
