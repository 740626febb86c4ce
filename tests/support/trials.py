"""Compares outputs with expected ones, and describes the first difference for the message of a failed test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CONTEXT = 40
"""Characters shown on both sides of a difference."""
_LOG_LINES = 20


@dataclass(slots=True)
class Trials:
    """Counts the trials whose result was the expected one."""

    good: int = 0
    n: int = 0
    first_difference: str = ""
    """Of the first trial with another result: its number, both results, seed, request id and the server's log."""

    def compare(
        self, expected: Any, got: Any, *, seed: object = None, request_id: str = "", log: Path | None = None
    ) -> None:
        """Adds a trial. `log` is the log file of the server that responded."""
        if expected == got:
            self.good += 1
        elif not self.first_difference:
            lines = [f"trial {self.n} (seed {seed}, request {request_id or 'without an id'}): {locate(expected, got)}"]
            if log:
                lines += [f"last lines of {log}:", *_log_lines(log, request_id)]
            self.first_difference = "\n".join(lines)
        self.n += 1

    def __iadd__(self, other: Trials) -> Trials:
        """Adds the trials of another."""
        self.first_difference = self.first_difference or other.first_difference
        self.good, self.n = self.good + other.good, self.n + other.n
        return self


def locate(expected: Any, got: Any, at: str = "") -> str:
    """Says where two results begin to differ, and how."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in [*expected, *(key for key in got if key not in expected)]:
            if key not in expected or key not in got:
                return f"{at}[{key!r}] is only in the {'expected' if key in expected else 'actual'} result"
            if expected[key] != got[key]:
                return locate(expected[key], got[key], f"{at}[{key!r}]")
    if isinstance(expected, str | list | tuple) and type(expected) is type(got) and expected != got:
        same = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
        if same is None:
            same = min(len(expected), len(got))
        elif not isinstance(expected, str):
            return locate(expected[same], got[same], f"{at}[{same}]")
        shown = [repr(one[max(0, same - _CONTEXT) : same + _CONTEXT]) for one in (expected, got)]
        return f"{at} from {same} on: expected {shown[0]}, got {shown[1]}; lengths {len(expected)}, {len(got)}"
    return f"{at}: expected {expected!r:.200}, got {got!r:.200}"


def _log_lines(log: Path, request_id: str) -> list[str]:
    """The last lines of a log, after earlier ones of this request."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else ["(there is no log)"]
    earlier = [line for line in lines[:-_LOG_LINES] if request_id and request_id in line]
    return [f"  {line}" for line in earlier + lines[-_LOG_LINES:]]
