"""The child's side of sandbox.py: limits that hold for the rest of the process, then question after question."""

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
"""Stands before every question and answer."""


_NICE = 5
"""A third of the share of the event loop and of the engine where they want the same core."""


def serve(answer: Callable[[bytes], bytes], *, seconds: float, most_bytes: int) -> None:
    """Answers until the pipe ends. Memory is bounded to `most_bytes`; a question that takes longer ends the process."""
    die_with_parent()
    questions = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    os.nice(_NICE)
    confine(most_bytes)
    _write(answers, b"")
    while header := questions.read(LENGTH.size):
        question = questions.read(LENGTH.unpack(header)[0])
        # The parent kills earlier. This is for the parent that was killed itself.
        signal.alarm(math.ceil(seconds) + 1)
        _write(answers, answer(question))
        signal.alarm(0)


def confine(most_bytes: int) -> None:
    """No more memory than this, no files written, few opened, no core dumped."""
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
