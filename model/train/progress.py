"""What a training run tells while it runs, and the names of things that can be typed. Knows no weights."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from model.train.material import Material


def progress_line(material: Material, *, step: int, loss: float, seconds: float, fraction: float) -> str:
    """fraction: how much of the run is done."""
    tokens, left = material.tokens(step), seconds * (1 - fraction) / max(fraction, 1e-9)
    return (
        f"step {step} loss {loss:.4f} tokens {tokens / 1e6:.2f}M epoch {material.epochs(step):.2f}"
        f" {tokens / seconds:.0f} tokens/s {100 * fraction:.1f} % done, {left / 60:.0f} min left"
    )


def tell(text: str) -> None:
    """To a terminal that may have gone with the same signal (| tee): the run must be saved all the same."""
    with contextlib.suppress(OSError, RuntimeError):
        print(text, file=sys.stderr, flush=True)


def python() -> str:
    """This interpreter, as it can be typed from here."""
    here, executable = Path.cwd(), Path(sys.executable)
    return str(executable.relative_to(here) if executable.is_relative_to(here) else executable)
