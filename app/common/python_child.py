"""How this program starts a Python child process: engines, sandboxes, and the build of kernels."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def python_command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command of `python -m MODULE` with this interpreter, for an environment of python_environment().

    With -P and an explicit path, so that a folder named app in the working directory is not imported.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


def python_environment() -> dict[str, str]:
    """This process's environment, in which a child imports the same modules."""
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}
