"""Named fault-injection points for tests, inert unless INKSTREAM_FAULTS names a folder when a process starts.

A fault is armed while the folder holds a file with the name of its point: JSON with `do` (see _ACTIONS), and
optionally `match` (fires only if the detail contains this text), `after` (number of hits to skip first), `times`
(disarms itself after so many), `seconds`. The file is read at each hit, so that a test can arm a running service.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "INKSTREAM_FAULTS"


class InjectedFault(Exception):
    """Raised by the action `raise`."""


def fault(point: str, detail: object = "") -> None:
    """Runs the action armed at this point, if any; tests select by `detail` with `match`."""
    if _REGISTRY and (spec := _REGISTRY.match(point, detail)):
        _ACTIONS[spec["do"]](spec)


class _FaultRegistry:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hits: Counter[str] = Counter()

    def match(self, point: str, detail: object) -> Mapping[str, Any] | None:
        try:
            spec: dict[str, Any] = json.loads((self._folder / point).read_bytes())
        except FileNotFoundError:
            self._hits.pop(point, None)
            return None
        if spec.get("match", "") not in str(detail):
            return None
        self._hits[point] += 1
        if self._hits[point] <= spec.get("after", 0):
            return None
        if self._hits[point] >= spec.get("after", 0) + spec.get("times", float("inf")):
            (self._folder / point).unlink(missing_ok=True)
        return spec


def _raise(error: Exception) -> None:
    raise error


def _hold_gil(spec: Mapping[str, Any]) -> None:
    """Sleeps in a PyDLL call, which keeps the GIL: no other thread of this process runs."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(spec.get("seconds", 600) * 1e6)))


_ACTIONS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "raise": lambda spec: _raise(InjectedFault(f"injected: {spec}")),
    "disk full": lambda _spec: _raise(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
    "out of memory": lambda _spec: _raise(MemoryError("injected")),
    "lose device": lambda _spec: _raise(RuntimeError("CUDA error: an illegal memory access was encountered")),
    "sleep": lambda spec: time.sleep(spec.get("seconds", 600)),
    "hold gil": _hold_gil,
    "exit": lambda spec: os._exit(spec.get("code", 0)),
    "kill": lambda _spec: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _spec: os.kill(os.getpid(), signal.SIGSTOP),
}
_REGISTRY = _FaultRegistry(Path(os.environ[VARIABLE])) if os.environ.get(VARIABLE) else None
