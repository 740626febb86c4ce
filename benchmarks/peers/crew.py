"""The processes of one comparison, one for each side; reports the sides that cannot load, with the reason."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.child import Child, ChildError
from benchmarks.peers.convert import ConvertError, convert
from benchmarks.peers.install import ENVIRONMENTS, InstallError, install, llama_library
from benchmarks.peers.plan import OURS
from benchmarks.peers.shapes import Model

_MODULES = {
    OURS: "ours",
    "openvino": "openvino",
    "llama.cpp": "llama",
    "ctranslate2": "ctranslate",
    "transformers": "hugging",
}
_HOMES = {"openvino": "openvino", "llama.cpp": "llama", "ctranslate2": "torch", "transformers": "torch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """Where everything lies, and how many threads every side gets."""

    folder: Path
    """Environments, models and logs; ignored by git."""
    threads: int
    batch: int
    length: int

    @property
    def models(self) -> Path:
        """Random checkpoints, and every model in the peers' formats."""
        return self.folder / "models"

    def python(self, side: str) -> Path:
        """Of the side's environment, which is made if need be. Raises InstallError."""
        if side == OURS:
            return Path(sys.executable)
        return install(ENVIRONMENTS[_HOMES[side]], self.folder)

    def converted(self, side: str, model: Model, precision: str) -> Path:
        """The model as this side reads it. Raises InstallError, ConvertError."""
        return convert(side, model, precision, python=self.python(side), folder=self.models)

    def start(self, side: str, model: Model, precision: str) -> Child:
        """A process that is loading. Raises InstallError, ConvertError."""
        path = self.converted(side, model, precision)
        sizes = [f"--{name}={getattr(self, name)}" for name in ("threads", "batch", "length")]
        command: list[str | Path] = [self.python(side), "-m", f"benchmarks.peers.sides.{_MODULES[side]}"]
        return self._child([*command, "--model", path, "--precision", precision, *sizes], side)

    def machine(self) -> Child:
        """The process that measures what the machine can do at most."""
        program = [sys.executable, "-m", "benchmarks.peers.sides.machine", f"--threads={self.threads}"]
        return self._child(program, "machine")

    def _child(self, command: Sequence[str | Path], name: str) -> Child:
        logs = self.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        environment = {"OMP_NUM_THREADS": str(self.threads), "LLAMA_CPP_LIB_PATH": str(llama_library(self.folder))}
        return Child(command, log=logs / f"{name}.log", environment=environment)


@dataclass(slots=True, kw_only=True)
class Crew:
    """Mutable, owned by one comparison: who is there, and why others are not."""

    children: dict[str, Child] = field(default_factory=dict)
    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def gather(self, shop: Workshop, sides: Sequence[str], model: Model, precision: str) -> None:
        """Loads one side after the other."""
        for side in sides:
            try:
                child = self.children[side] = shop.start(side, model, precision)
                self.facts[side] = child.facts()
            except (InstallError, ConvertError, ChildError) as error:
                self.lose(side, str(error))

    def lose(self, side: str, reason: str) -> None:
        """A side that takes part no longer."""
        self.missing[side] = reason
        if child := self.children.pop(side, None):
            child.close()

    def dismiss(self) -> None:
        """Ends all processes."""
        for child in self.children.values():
            child.close()
        self.children.clear()
