"""Processes of the compared engines: one adapter process each, called one at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.plan import OURS
from benchmarks.peers.provision import ENVIRONMENTS, ConvertError, InstallError, convert, install, llama_library
from benchmarks.peers.shapes import Model

_ROOT = Path(__file__).parent.parent.parent
_CLOSE_SECONDS = 30
_TUNING_PREFIXES = ("PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ATEN_", "INKSTREAM_", "LLAMA_", "CT2_")
_MODULES = {
    OURS: "inkstream",
    "openvino": "openvino",
    "llama.cpp": "llama_cpp",
    "ctranslate2": "ctranslate2",
    "transformers": "transformers",
}
_ENVIRONMENTS = {"openvino": "openvino", "llama.cpp": "llama", "ctranslate2": "torch", "transformers": "torch"}


def plain_environment() -> dict[str, str]:
    """This process's environment without variables that tune engines: a passive OpenMP slows peers many times over."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_TUNING_PREFIXES)}


class AdapterError(RuntimeError):
    """An adapter that cannot do something, or whose process died; the message is the reason in the table."""


class AdapterProcess:
    """Client of an adapter process. Calls are synchronous, so that only one engine computes at a time."""

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
        """Waits until the adapter has loaded its model. Raises AdapterError with its reason."""
        facts: dict[str, str] = self._read()["ready"]
        return facts

    def ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Calls an operation. Raises AdapterError if the adapter does not support it or its process died."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"do": operation, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise AdapterError(self._exit_reason()) from None
        return self._read()

    def close(self) -> None:
        """Closes standard input, which ends the process; kills it after a timeout."""
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
            raise AdapterError(self._exit_reason())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise AdapterError(answer["error"])
        return answer

    def _exit_reason(self) -> str:
        """Exit code and last log line."""
        code = self._process.wait()
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"its process ended with {code}: {lines[-1].strip()[:160] if lines else 'its log is empty'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Folder and sizes that all adapters share."""

    folder: Path
    """Environments, models and logs; ignored by git."""
    threads: int
    batch: int
    length: int

    @property
    def models(self) -> Path:
        """Random checkpoints, and all models in the peers' formats."""
        return self.folder / "models"

    def log(self, name: str) -> Path:
        """Log file of a process."""
        folder = self.folder / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.log"

    def python(self, engine: str) -> Path:
        """Python of the engine's environment, which is created on first use. Raises InstallError."""
        if engine == OURS:
            return Path(sys.executable)
        return install(ENVIRONMENTS[_ENVIRONMENTS[engine]], self.folder)

    def converted(self, engine: str, model: Model, precision: str) -> Path:
        """Path of the model in the engine's format. Raises InstallError, ConvertError."""
        return convert(engine, model, precision, python=self.python(engine), folder=self.models)

    def start(self, engine: str, model: Model, precision: str) -> AdapterProcess:
        """Starts a process that loads the model. Raises InstallError, ConvertError."""
        path = self.converted(engine, model, precision)
        sizes = [f"--{name}={getattr(self, name)}" for name in ("threads", "batch", "length")]
        command: list[str | Path] = [self.python(engine), "-m", f"benchmarks.peers.adapters.{_MODULES[engine]}"]
        return self._start_process([*command, "--model", path, "--precision", precision, *sizes], engine)

    def start_machine_limits(self) -> AdapterProcess:
        """Starts the process that measures the peaks of the machine."""
        program = [sys.executable, "-m", "benchmarks.peers.adapters.machine_limits", f"--threads={self.threads}"]
        return self._start_process(program, "machine")

    def _start_process(self, command: Sequence[str | Path], name: str) -> AdapterProcess:
        environment = {"OMP_NUM_THREADS": str(self.threads), "LLAMA_CPP_LIB_PATH": str(llama_library(self.folder))}
        return AdapterProcess(command, log=self.log(name), environment=environment)


@dataclass(slots=True, kw_only=True)
class PeerPool:
    """Adapter processes of one comparison, and the reasons of missing ones."""

    processes: dict[str, AdapterProcess] = field(default_factory=dict)
    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def load(self, workspace: Workspace, engines: Sequence[str], model: Model, precision: str) -> None:
        """Loads one engine after the other."""
        for engine in engines:
            try:
                process = self.processes[engine] = workspace.start(engine, model, precision)
                self.facts[engine] = process.facts()
            except (InstallError, ConvertError, AdapterError) as error:
                self.drop(engine, str(error))

    def drop(self, engine: str, reason: str) -> None:
        """Removes an engine, and records why."""
        self.missing[engine] = reason
        if process := self.processes.pop(engine, None):
            process.close()

    def close(self) -> None:
        """Ends all processes."""
        for process in self.processes.values():
            process.close()
        self.processes.clear()
