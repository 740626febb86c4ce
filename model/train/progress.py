"""How far a run is, as one line for people: short for a terminal, long for a file. Knows no weights and no files."""

from __future__ import annotations

import contextlib
import math
import sys
from dataclasses import dataclass
from pathlib import Path

_WIDEST_BAR = 30
_NARROWEST_BAR = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the run tells after each step of the optimiser."""

    step: int
    """Steps done."""
    loss: float
    """Of this step's batch, in nats a target."""
    lr_factor: float
    """Share of the full learning rates."""
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Targets seen so far."""
    epoch: float
    fraction: float
    """How much of the run is done, from 0 to 1."""
    seconds: float
    """Time spent so far, that before a resume too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The same with what only a look back can tell."""

    progress: Progress
    loss: float
    """Smoothed over the last steps."""
    tokens_per_second: float
    """Of late; 0 where nothing can be told yet."""
    mfu: float | None
    """Share of the device's peak arithmetic; None where that is not known."""
    held_out: float | None
    """Bits per byte, where they were measured."""
    seconds_left: float | None


def plain_line(status: Status) -> str:
    """For files and pipes: a whole line, which says everything."""
    p = status.progress
    held_out = "" if status.held_out is None else f" held-out {status.held_out:.4f}"
    return (
        f"step {p.step} loss {status.loss:.4f}{held_out} tokens {_short(p.tokens)} epoch {p.epoch:.2f}"
        f" {status.tokens_per_second:.0f} tokens/s MFU {_mfu(status)} {100 * p.fraction:.1f} % done,"
        f" {duration(status.seconds_left)} left"
    )


def bar_line(status: Status, width: int, *, filled: str, empty: str) -> tuple[str, str, str]:
    """For a terminal: (what is left of the bar, the bar itself, what is right of it), `width` columns at most together.

    Where there is little room, the figures that matter least are left out first. filled, empty: what the bar is made
    of, a column each.
    """
    p, held_out = status.progress, status.held_out
    ranked = [  # by place in the line; the number says how early it goes
        (5, f"step {p.step}"),
        (7, f"loss {status.loss:.3f}"),
        (6, "" if held_out is None else f"held-out {held_out:.3f}"),
        (4, f"{_short(status.tokens_per_second)} tok/s"),
        (2, f"MFU {_mfu(status)}"),
        (1, f"epoch {p.epoch:.2f}"),
        (3, f"{duration(status.seconds_left)} left"),
    ]
    percent, parts = f"{100 * p.fraction:.1f} % ", [part for part in ranked if part[1]]
    while True:
        text = "".join(f"  {words}" for _, words in parts)
        room = width - len(percent) - len(text)
        if room >= _NARROWEST_BAR or not parts:
            break
        parts.remove(min(parts))
    columns = max(0, min(room, _WIDEST_BAR)) // 5 * 5  # so that it does not jump with every figure's length
    done = math.floor(columns * p.fraction)
    return percent[:width], filled * done + empty * (columns - done), text


def duration(seconds: float | None) -> str:
    """Time for people, in the two units that matter."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes = round(seconds / 60)
    return f"{minutes}m" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02}m"


def say(text: str) -> None:
    """To stdout. Whoever read there may have gone (| head), or its disk may be full: hours of training go on."""
    with contextlib.suppress(OSError, RuntimeError):
        print(_in_encoding_of(sys.stdout, text), flush=True)


def tell(text: str) -> None:
    """To a terminal that may have gone with the same signal (| tee): the run must be saved all the same."""
    with contextlib.suppress(OSError, RuntimeError):
        print(_in_encoding_of(sys.stderr, text), file=sys.stderr, flush=True)


def python() -> str:
    """This interpreter, as it can be typed from here."""
    here, executable = Path.cwd(), Path(sys.executable)
    return str(executable.relative_to(here) if executable.is_relative_to(here) else executable)


def _in_encoding_of(stream: object, text: str) -> str:
    """With "?" for what the stream cannot show: samples have curly quotes, and a result is not lost over them."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="replace").decode(encoding)


def _mfu(status: Status) -> str:
    return "n/a" if status.mfu is None else f"{100 * status.mfu:.0f} %"


def _short(number: float) -> str:
    if number < 1e4:
        return f"{number:.0f}"
    return f"{number / 1e3:.1f}k" if number < 1e6 else f"{number / 1e6:.2f}M"
