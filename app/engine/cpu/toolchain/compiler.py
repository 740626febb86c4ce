"""The C++ compiler: which one there is, and how it is run. Knows nothing of kernels or caches."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.engine.cpu.toolchain.errors import BuildError, NoCompiler
from app.engine.cpu.toolchain.guarded_subprocess import leashed

_NAMES = ("g++", "clang++", "c++")
_HOW_TO_GET_ONE = "install one (Debian: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install)"
_MOST_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """A compiler that answers."""

    command: tuple[str, ...]
    version: str


def compiler_commands(environment: Mapping[str, str]) -> list[tuple[str, ...]]:
    """What $CXX names, else every compiler on the PATH, best first. Raises NoCompiler."""
    path = environment.get("PATH")
    if asked := environment.get("CXX", "").strip():
        try:
            words = shlex.split(asked)
        except ValueError:
            words = []
        if not words or shutil.which(words[0], path=path) is None:
            raise NoCompiler(f"CXX names {asked!r}, which is not there: unset CXX, or name a C++ compiler")
        return [tuple(words)]
    found: list[tuple[str, ...]] = [(place,) for name in _NAMES if (place := shutil.which(name, path=path))]
    if not found:
        raise NoCompiler(f"there is no C++ compiler on this machine: {_HOW_TO_GET_ONE}")
    return found


def find_compiler(environment: Mapping[str, str] | None = None) -> Compiler:
    """The first compiler that tells its version. Raises NoCompiler."""
    commands = compiler_commands(os.environ if environment is None else environment)
    for command in commands:
        # macOS has a c++ that only says that there is none.
        with contextlib.suppress(BuildError):
            lines = [line for line in run((*command, "--version"), Path.cwd(), 20.0).splitlines() if line.strip()]
            return Compiler(command=command, version=_tidy(lines[0]) if lines else "unknown")
    raise NoCompiler(f"{shlex.join(commands[0])} is no compiler that works: {_HOW_TO_GET_ONE}")


def run(command: Sequence[str], folder: Path, seconds: float) -> str:
    """What the command prints; its temporary files go to `folder`. It does not outlive us. Raises BuildError."""
    end, leash = os.pipe()
    try:
        process = subprocess.Popen(
            leashed(command),
            stdin=end,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)},
        )
    except OSError as error:
        os.close(leash)
        raise BuildError(f"{command[0]} cannot be run ({error.strerror})") from None
    finally:
        os.close(end)
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        more = "inkstream compile --time-limit gives it more"
        raise BuildError(f"{command[0]} took more than {seconds:g} seconds; {more}") from None
    finally:
        os.close(leash)
        process.communicate()
    if process.returncode:
        raise BuildError(_complaint(command[0], errors.decode("utf-8", "replace"), process.returncode))
    return out.decode("utf-8", "replace")


def _complaint(name: str, text: str, code: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = next((line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)), lines[-1] if lines else "")
    if not first and code > 128:
        first = f"it was killed by signal {code - 128}; is there enough memory?"
    return f"{name} failed: {_tidy(first or f'exit code {code}')}"


def _tidy(line: str) -> str:
    """One line of printable ASCII, and not a long one."""
    text = " ".join(re.sub(r"[^ -~]+", " ", line).split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
