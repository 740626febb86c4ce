"""Runs a program on a pseudo-terminal: types input, and reads the screen output."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from tests.support.servers import hang_on


class PseudoTerminal:
    """A running program on a pseudo-terminal, which is its controlling terminal and its standard streams."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self._seen = 0
        self.output = ""
        """All output of the program so far."""

    def send(self, text: str) -> None:
        """Types `text`; \\r is Enter, \\x03 Ctrl+C, \\x04 Ctrl+D."""
        os.write(self._master, text.encode())

    def expect(self, words: str, seconds: float = 60.0) -> str:
        """Waits until the program prints `words`; returns the output since the last expect() up to their end."""
        deadline = time.monotonic() + seconds
        while (end := self.output.find(words, self._seen)) < 0:
            assert self._read(deadline - time.monotonic()), f"no {words!r} in {self.output[self._seen :]!r}"
        before, self._seen = self._seen, end + len(words)
        return self.output[before : self._seen]

    def leave(self, seconds: float = 60.0) -> int:
        """Types Ctrl+D until the program ends, since one typed between two prompts is lost; returns the exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self.send("\x04")
            self._read(0.2)
        return self.wait(1.0)

    def wait(self, seconds: float = 60.0) -> int:
        """Reads to the end of the output; returns the exit code."""
        while self._read(seconds):
            pass
        return self.process.wait(seconds)

    def _read(self, seconds: float) -> bool:
        """Reads available output, waiting at most `seconds`. False at the end of the output or after the timeout."""
        ready, _, _ = select.select([self._master], [], [], max(0.0, seconds))
        data = b""
        if ready:
            with contextlib.suppress(OSError):  # Linux: EIO once the program has closed its side
                data = os.read(self._master, 65536)
        self.output += data.decode("utf-8", "replace")
        return bool(data)


@contextlib.contextmanager
def on_terminal(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[PseudoTerminal]:
    """Runs `command` on a pseudo-terminal; kills it at the end of the block if it still runs."""
    master, slave = pty.openpty()
    with contextlib.closing(os.fdopen(master, "rb", buffering=0)):
        variables = None if environment is None else {**os.environ, **environment}
        process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=variables, preexec_fn=partial(hang_on, slave)
        )
        os.close(slave)
        try:
            yield PseudoTerminal(process, master)
        finally:
            process.kill()
            process.wait()
