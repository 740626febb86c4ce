"""Child side of sandbox.py: sets process limits, then answers requests from a pipe."""

from __future__ import annotations

import math
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import BinaryIO

from app.common.operating_system import die_with_parent

LENGTH = struct.Struct("<I")
"""Length prefix of every request and response."""


_NICE = 5
"""A third of the CPU share of the event loop and the engine on a contended core."""


def serve(answer: Callable[[bytes], bytes], *, seconds: float, most_bytes: int) -> None:
    """Answers until the pipe closes, within `most_bytes` of memory; a request over `seconds` ends the process."""
    die_with_parent()
    questions = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps library output out of the response pipe
    os.nice(_NICE)
    confine(most_bytes)
    _write(answers, b"")
    while header := questions.read(LENGTH.size):
        question = questions.read(LENGTH.unpack(header)[0])
        # The parent kills earlier; this limit applies if the parent itself was killed.
        signal.alarm(math.ceil(seconds) + 1)
        _write(answers, answer(question))
        signal.alarm(0)


def confine(most_bytes: int) -> None:
    """Limits memory, forbids file writes and core dumps, and allows few open files."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    limits = {
        resource.RLIMIT_AS: most_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 16,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _write(pipe: BinaryIO, content: bytes) -> None:
    pipe.write(LENGTH.pack(len(content)) + content)
    pipe.flush()
