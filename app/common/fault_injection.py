"""Named fault-injection points for tests, inert unless INKSTREAM_FAULTS names a folder when a process starts.

A fault is armed while the folder holds a file of its point's name: JSON with `do` (see _DEEDS), and if need be
`match` (only where this text is in the detail), `after` (so many times nothing happens first), `times` (it is disarmed
after so many), `seconds`. It is looked for each time, so a test arms and disarms a running service.
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
    """What `do: raise` raises."""


def fault(point: str, detail: object = "") -> None:
    """Does what is armed at this point, if anything; `detail` is what a test may pick its victim by."""
    if _SWITCHBOARD and (order := _SWITCHBOARD.take(point, detail)):
        _DEEDS[order["do"]](order)


def is_armed(point: str, detail: object = "") -> bool:
    """Whether something is armed here; for places that spoil a value themselves (`do` is then any word)."""
    return bool(_SWITCHBOARD and _SWITCHBOARD.take(point, detail))


class _Switchboard:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hits: Counter[str] = Counter()

    def take(self, point: str, detail: object) -> Mapping[str, Any] | None:
        try:
            order: dict[str, Any] = json.loads((self._folder / point).read_bytes())
        except FileNotFoundError:
            self._hits.pop(point, None)
            return None
        if order.get("match", "") not in str(detail):
            return None
        self._hits[point] += 1
        if self._hits[point] <= order.get("after", 0):
            return None
        if self._hits[point] >= order.get("after", 0) + order.get("times", float("inf")):
            (self._folder / point).unlink(missing_ok=True)
        return order


def _raise(order: Mapping[str, Any]) -> None:
    raise InjectedFault(f"injected: {order}")


def _disk_full(_order: Mapping[str, Any]) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _out_of_memory(_order: Mapping[str, Any]) -> None:
    raise MemoryError("injected")


def _lose_device(_order: Mapping[str, Any]) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _hold_gil(order: Mapping[str, Any]) -> None:
    """PyDLL calls keep the GIL: no other thread of this process runs."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(order.get("seconds", 600) * 1e6)))


_DEEDS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "raise": _raise,
    "disk full": _disk_full,
    "out of memory": _out_of_memory,
    "lose device": _lose_device,
    "sleep": lambda order: time.sleep(order.get("seconds", 600)),
    "hold gil": _hold_gil,
    "exit": lambda order: os._exit(order.get("code", 0)),
    "kill": lambda _order: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _order: os.kill(os.getpid(), signal.SIGSTOP),
}
_SWITCHBOARD = _Switchboard(Path(os.environ[VARIABLE])) if os.environ.get(VARIABLE) else None
