"""What a library of kernels is made of, and so what it is called. Knows no directory and no compiler.

The name holds a key of everything that the library depends on, but not of the compiler: a machine that has none (the
last stage of a container) must be able to tell whether a library is the right one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from app.engine.cpu.toolchain.cpu_target import CpuTarget

ABI = 2
"""What ink_abi() of the library must answer; raised whenever an exported function changes."""
SOURCE = Path(__file__).parents[1] / "source"
UNIT = "inkstream.cpp"
"""The one file that is compiled; it includes those beside it."""
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-pthread")
_KEY_DIGITS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRecipe:
    """One library: these files, compiled with these flags for this level."""

    level: CpuTarget
    source: Path = SOURCE

    @property
    def flags(self) -> tuple[str, ...]:
        """All that the compiler is told, but for the files."""
        return (*FLAGS, *self.level.flags)

    @property
    def name(self) -> str:
        """Of the library's file. Reads the sources."""
        parts = [str(ABI), self.level.machine, self.level.name, self.level.cpu, *self.flags]
        for path in sorted(self.source.iterdir()):
            if path.suffix in (".cpp", ".h"):
                parts += [path.name, hashlib.sha256(path.read_bytes()).hexdigest()]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_KEY_DIGITS]
        return f"inkstream-{self.level.name}-{key}.so"
