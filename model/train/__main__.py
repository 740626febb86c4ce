"""Entry point of `python -m model.train`: handles wrong flags and Ctrl+C before the heavy imports of command.py."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from model.machine import INSTALL_TORCH

_SERVES_ONLY = (
    "this installation can serve, but not train: it lacks torch, or sympy, which torch's optimizers import; "
    f"{INSTALL_TORCH}, or build the image with torch and --build-arg SLIM="
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of model.train.command."""
    # Ctrl+C during the imports would print a traceback. There is nothing to clean up yet.
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else the parent process ignores it
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from model.train.options import parse

    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parse(arguments)  # reports a wrong flag immediately: torch takes seconds to import
    if find_spec("torch") is None or find_spec("sympy") is None:
        print(f"error: {_SERVES_ONLY}", file=sys.stderr)
        return 2
    from model.train.command import run

    signal.signal(signal.SIGINT, before)
    return run(options, arguments)


if __name__ == "__main__":
    sys.exit(main())
