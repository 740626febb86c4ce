"""Processes of the compared engines: one adapter process each, called one at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.provision import OURS, PeerError, convert, install, llama_variables, program_of, vllm_preload
from benchmarks.service_process import ROOT
from benchmarks.shapes import Model

_CLOSE_SECONDS = 30
_TUNING_PREFIXES = ("PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ATEN_", "INKSTREAM_", "LLAMA_", "VLLM_")


def plain_environment() -> dict[str, str]:
    """This process's environment without variables that tune engines: a passive OpenMP slows peers many times over."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_TUNING_PREFIXES)}


class AdapterProcess:
    """Client of an adapter process. Calls are synchronous, so that only one engine computes at a time."""

    def __init__(self, command: Sequence[str | Path], *, log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        variables = {**plain_environment(), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **environment}
        pipe = subprocess.PIPE
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdin=pipe, stdout=pipe, stderr=errors, text=True
            )

    def facts(self) -> dict[str, str]:
        """Waits until the adapter has loaded its model. Raises PeerError with its reason."""
        facts: dict[str, str] = self._read()["ready"]
        return facts

    def ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Calls an operation. Raises PeerError if the adapter does not support it or its process died."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"do": operation, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(self._exit_reason()) from None
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
            raise PeerError(self._exit_reason())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
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

    def installed(self, engine: str, model: Model, precision: str) -> tuple[Path, Path]:
        """Python of the engine's environment, and the model in its format. Raises PeerError."""
        if engine == OURS:
            return Path(sys.executable), model.directory
        python = install(engine, self.folder)
        return python, convert(engine, model, precision, python=python, folder=self.folder)

    def start(self, engine: str, model: Model, precision: str) -> AdapterProcess:
        """Starts a process that loads the model. Raises PeerError."""
        python, path = self.installed(engine, model, precision)
        sizes = [f"--{name}={getattr(self, name)}" for name in ("threads", "batch", "length")]
        command: list[str | Path] = [python, "-m", f"benchmarks.peers.adapters.{program_of(engine).replace('.', '_')}"]
        command += ["--model", path, "--precision", precision, *sizes]
        # vLLM's engine then computes in the adapter's own process, which steps it.
        environment = {**self.variables(engine), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return AdapterProcess(command, log=self.log(f"{engine}-{precision}"), environment=environment)

    def variables(self, engine: str) -> dict[str, str]:
        """Environment of an engine's processes, beyond plain_environment()."""
        variables = {"OMP_NUM_THREADS": str(self.threads)}
        if program_of(engine) == "llama.cpp":
            variables |= llama_variables(self.folder)
        if engine == "vllm":
            # As many threads as the other engines have: vLLM leaves one core to its server by default.
            variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
            variables |= vllm_preload(self.folder)
            variables["VLLM_CACHE_ROOT"] = str(self.folder / "vllm-cache")
        return variables
