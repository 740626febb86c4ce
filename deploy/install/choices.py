"""What to install with, which build of torch, and what to say when it fails; no step is carried out here."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

OLDEST, NEWEST = (3, 11), (3, 13)
"""Python versions that inkstream is tested with; a newer one is tried."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Linux builds of torch without CUDA. The package index itself has those with CUDA, for x86-64 and for aarch64."""
_OLDEST_DRIVER = 580
"""NVIDIA's driver for CUDA 13, which torch's builds are for."""
_SOURCES = re.compile(r"--(index-url|extra-index-url|find-links|no-index)\b|-[if]")
UNAVAILABLE = re.compile(r"No matching distribution|No solution found|Failed to fetch: `?\S+/torch/`?\s")
"""What pip and uv say where no place that they looked at has the version."""
_OF_PIP_ALONE = {
    "break-system-packages", "cache-dir", "cert", "default-timeout", "disable-pip-version-check", "no-cache-dir",
    "no-index", "no-input", "no-warn-script-location", "progress-bar", "quiet", "require-virtualenv", "retries",
    "root-user-action", "timeout", "user", "verbose",
}  # fmt: skip
"""pip's settings that do not change what is installed from where. uv takes certificates from SSL_CERT_FILE."""


class InstallError(Exception):
    """A failure with a message for users: what is wrong and what to do. `is_consistent`: the environment is usable."""

    def __init__(self, message: str, *, is_consistent: bool = False) -> None:
        super().__init__(message)
        self.is_consistent = is_consistent


class Settings(NamedTuple):
    """What make's variables ask for."""

    group: str
    venv: Path
    torch: str = ""
    pip_args: tuple[str, ...] = ()
    locks: tuple[str, ...] = ()
    uv: str = ""
    python: str = ""

    @property
    def names_sources(self) -> bool:
        """Whether PIP_ARGS says where packages come from."""
        return any(map(_SOURCES.match, self.pip_args))


class Machine(NamedTuple):
    """What the choice of torch's build depends on."""

    system: str
    gpu: str = ""
    """Name of the first NVIDIA GPU that a driver reports."""
    driver: int = 0
    """Major version of that driver; 0: unknown."""


class Torch(NamedTuple):
    """The torch to install, and why."""

    requirement: str
    build: str
    """cpu, cuda, or nothing where the platform, the requirement or PIP_ARGS leave no choice."""
    reason: str
    is_demanded: bool = False

    def candidates(self, *, names_sources: bool) -> list[tuple[str, tuple[str, ...]]]:
        """Requirements in the order to try them, each with further options of the installer."""
        found: list[tuple[str, tuple[str, ...]]] = []
        if self.build == "cpu":
            places = [()] if names_sources else [("--extra-index-url", CPU_INDEX), ()]
            found = [(f"{self.requirement}+cpu", place) for place in places]
        elif self.build == "cuda":
            found = [(f"{self.requirement},!={self.requirement.partition('==')[2]}+cpu", ())]
        return found if found and self.is_demanded else [*found, (self.requirement, ())]


def choose_torch(settings: Settings, pin: str, kept: str, machine: Machine) -> Torch:
    """The build for this machine. `kept` is the build of before, which stays until TORCH= asks. Raises InstallError."""
    asked = settings.torch
    requirement = pin if asked in ("", "auto", "cpu", "cuda") else asked
    if asked in ("cpu", "cuda") and machine.system != "Linux":
        raise InstallError(f"TORCH={asked} is for Linux: {machine.system} has one build of torch; leave it out")
    if asked in ("cpu", "cuda"):
        return Torch(requirement, asked, f"TORCH={asked} asks for it", is_demanded=True)
    if machine.system != "Linux":
        return Torch(requirement, "", f"the one for {machine.system}")
    if not re.fullmatch(r"torch==[\w.]+", requirement):
        return Torch(requirement, "", "as TORCH= says")
    if settings.names_sources:
        return Torch(requirement, "", "from where PIP_ARGS says")
    if kept and not asked:
        return Torch(requirement, kept, "as before; TORCH=auto chooses again")
    if not machine.gpu:
        return Torch(requirement, "cpu", "no NVIDIA GPU is seen; TORCH=cuda takes the other")
    if machine.driver and machine.driver < _OLDEST_DRIVER:
        reason = f"{machine.gpu}, but its driver {machine.driver} is too old for CUDA 13: update it to {_OLDEST_DRIVER}"
        return Torch(requirement, "cuda", reason)
    return Torch(requirement, "cuda", f"for {machine.gpu}; TORCH=cpu takes the other")


def look_at_machine() -> Machine:
    """The system, and the GPU that NVIDIA's driver reports."""
    system = {"Darwin": "macOS"}.get(os.uname().sysname, os.uname().sysname)
    for program in ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            query = [program, "--query-gpu=driver_version,name", "--format=csv,noheader"]
            shown = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
            if row := re.match(r"(\d+)[\d.]*, (.+)", shown):
                return Machine(system, row[2].strip(), int(row[1]))
    return Machine(system)


def explain(output: str, tool: str) -> InstallError:
    """The likeliest reason why pip or uv failed, and what to do about it."""
    elsewhere = "make's PIP_ARGS names another index or a folder"
    if re.search(r"No space left on device|os error 28|Disk quota exceeded", output):
        return InstallError(
            "the disk became full: free some space, then run make again (docs/install.md has the sizes)"
        )
    if re.search(r"DO NOT MATCH THE HASHES|[Hh]ash mismatch", output):
        text = (
            "a package is not the one of the lock, pip says which above: another index that builds its own needs LOCK="
        )
        return InstallError(text.replace("pip", tool), is_consistent=True)
    network = (
        r"name resolution|NewConnection|ConnectTimeout|ReadTimeout|Network is unreachable|Connection refused|dns error"
    )
    if re.search(network + r"|ProxyError|client error \(Connect\)|Connection broken|CERTIFICATE_VERIFY", output):
        text = "the package index cannot be reached: check network and proxy (HTTPS_PROXY), then run make again; or "
        text += 'install from a folder of wheels: make serve PIP_ARGS="--no-index --find-links DIR" LOCK='
        return InstallError(text, is_consistent=True)
    if UNAVAILABLE.search(output):
        python = ".".join(map(str, sys.version_info[:2]))
        text = f"no package for Python {python} on {os.uname().machine} where {tool} looked, it says which above; "
        text += (
            f"inkstream is tested with Python 3.{OLDEST[1]} to 3.{NEWEST[1]} (PYTHON=python3.{NEWEST[1]}); {elsewhere}"
        )
        return InstallError(text, is_consistent=True)
    other = "UV= takes pip; " if tool == "uv" else ""
    return InstallError(f"packages could not be installed, {tool} says why above; {other}{elsewhere}")


def uv_options(pip_config: str) -> tuple[str, ...] | None:
    """pip's settings (of pip config list) as options of uv; None if uv lacks one, so that pip must install."""
    options: list[str] = []
    for name, text in re.findall(r"^\S*?\.([\w-]+)=(.+)$", pip_config, re.MULTILINE):
        value = str(ast.literal_eval(text))
        if name in ("index-url", "extra-index-url", "find-links"):
            options += [part for one in value.split() for part in (f"--{name}", one)]
        elif name == "no-index" and value.lower() in ("1", "true", "yes", "on"):
            options.append("--no-index")
        elif name not in _OF_PIP_ALONE:
            return None
    return tuple(options)
