"""Child process that reads the pickle of one file: python -m app.cli.torch_file_worker SECONDS."""

from __future__ import annotations

import resource
import sys

from app.sandbox.sandbox_child import serve
from model.checkpoint.torch_file import answer_question

_MEMORY = 512 << 20
"""Bytes of address space besides what Python and its modules use."""


def main(seconds: float) -> None:
    """Answers one question, about one file."""
    serve(lambda question: answer_question(question, _forbid_files_and_processes), seconds=seconds, more_bytes=_MEMORY)


def _forbid_files_and_processes() -> None:
    """From now on this process can open no file or socket, and start no process."""
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))


if __name__ == "__main__":
    main(float(sys.argv[1]))
