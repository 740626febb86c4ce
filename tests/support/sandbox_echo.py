"""A sandbox child for tests/sandbox/test_sandbox.py: executes the command in its request."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from app.sandbox.sandbox_child import serve


def _answer(question: bytes) -> bytes:
    verb, _, rest = question.decode().partition(" ")
    match verb:
        case "sleep":
            time.sleep(float(rest))
        case "spin":
            while True:
                pass
        case "exit":
            os._exit(int(rest))
        case "grow":
            return b"x" * int(rest)
        case "hold":
            try:
                return str(len(bytearray(int(rest)))).encode()
            except MemoryError:
                return b"MemoryError"
        case "write":
            try:
                Path(rest).write_bytes(b"x" * 10_000)
            except OSError as error:
                return type(error).__name__.encode()
        case "environment":
            return " ".join(os.environ).encode()
        case "pid":
            return str(os.getpid()).encode()
        case "print":
            print("this is no answer", flush=True)
    return question


if __name__ == "__main__":
    serve(_answer, seconds=float(sys.argv[1]), more_bytes=192 << 20)
