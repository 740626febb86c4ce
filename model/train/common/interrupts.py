"""Early ends of a run: the loss diverged, or a signal asked it to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model.train.common.console_messages import tell

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl+C, termination by another process, and a closed terminal."""


class Diverged(RuntimeError):
    """The loss, its gradient or the weights are not finite. The weights were not saved."""

    def __init__(self, what: str, good: Path | None) -> None:
        """good: the last snapshot."""
        stands = f"the last good snapshot is {good}" if good else "there was no snapshot yet"
        super().__init__(
            f"{what}; {stands}. Start anew with --overwrite and half of --lr (with Muon of --matrix-lr, too), or a "
            "longer --warm-up"
        )


class Interrupted(RuntimeError):
    """A signal asked the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class StopRequest:
    """Whether a signal asked the run to stop."""

    def __init__(self) -> None:
        self.number = 0
        """Of the first signal; 0 while there was none."""

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Within the block, signals are remembered. Signals that the parent process ignores stay ignored."""
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        caught = [number for number in _SIGNALS if before[number] is not signal.SIG_IGN]
        for number in caught:
            signal.signal(number, self._remember)
        try:
            yield
        finally:
            for number in caught:
                signal.signal(number, before[number])

    def obey(self) -> None:
        """Raises Interrupted where a signal has come."""
        if self.number:
            raise Interrupted(self.number)

    def _remember(self, number: int, _frame: object) -> None:
        self.number = self.number or number
        # The same one again. torchrun adds a SIGTERM of its own to a terminal's SIGINT, which is no second request.
        signal.signal(number, signal.SIG_DFL)
        tell("saving, then ending; the same signal again ends at once")
