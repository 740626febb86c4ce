"""Client of a side's process: started once, called repeatedly."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent.parent
_CLOSE_SECONDS = 30
_STEERING = ("PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ATEN_", "INKSTREAM_", "LLAMA_", "CT2_")


def plain_environment() -> dict[str, str]:
    """This process's, without what steers one engine or another: a passive OpenMP slows peers many times over."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_STEERING)}


class ChildError(RuntimeError):
    """A side that cannot, or that died; the message is the reason in the table."""


class Child:
    """Mutable, owned by the run. One question at a time: while it is answered, no other side computes."""

    def __init__(self, command: Sequence[str | Path], *, log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=_ROOT,
                env={**plain_environment(), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def facts(self) -> dict[str, str]:
        """Waits until the side has loaded. Raises ChildError with the side's reason."""
        facts: dict[str, str] = self._read()["ready"]
        return facts

    def ask(self, what: str, **details: Any) -> dict[str, Any]:
        """Raises ChildError where the side cannot, or has died."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"do": what, **details}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildError(self._end()) from None
        return self._read()

    def close(self) -> None:
        """The end of its input is its end; what does not end is killed."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.close()
            self._process.wait(_CLOSE_SECONDS)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise ChildError(self._end())
        answer: dict[str, Any] = json.loads(line)
        if "cannot" in answer:
            raise ChildError(answer["cannot"])
        return answer

    def _end(self) -> str:
        """Why it ended, as far as it said."""
        code = self._process.wait()
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"its process ended with {code}: {lines[-1].strip()[:160] if lines else 'without a word'}"
