"""Child side of sandbox.py: sets process limits, then handles requests from a pipe."""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from app.common.frames import encode_body, read_body
from app.common.operating_system import die_with_parent

_NICE = 5
"""A third of the CPU share of the event loop and the engine on a contended core."""


def serve(handler: Callable[[bytes], bytes], *, seconds: float, more_bytes: int) -> None:
    """Handles requests until the pipe closes; a request over `seconds` ends it.

    more_bytes: limit of the address space in addition to what the process uses now.
    """
    die_with_parent()
    requests = sys.stdin.buffer
    responses = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps library output out of the response pipe
    os.nice(_NICE)
    statm = Path("/proc/self/statm")
    used_pages = (
        int(statm.read_text().split()[0]) if statm.exists() else 0
    )  # Linux alone has it, and holds to the limit
    confine(used_pages * resource.getpagesize() + more_bytes)
    _write(responses, b"")
    while (request := read_body(requests)) is not None:
        # The parent kills earlier; this limit applies if the parent itself was killed.
        signal.alarm(math.ceil(seconds) + 1)
        _write(responses, handler(request))
        signal.alarm(0)


def confine(max_bytes: int) -> None:
    """Limits memory, forbids file writes and core dumps, and allows few open files."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    limits = {
        resource.RLIMIT_AS: max_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 16,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _write(pipe: BinaryIO, content: bytes) -> None:
    pipe.write(encode_body(content))
    pipe.flush()
