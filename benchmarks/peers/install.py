"""Virtual environments of the peers, created from PyPI on first use. A failed installation is reported with its reason.

llama.cpp comes as the source of llama-cpp-python: its own cmake project gives libllama for this CPU, which the binding
is pointed to, and llama-server, which the wheel does not have and which answers many requests at once.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# The same torch everywhere; one that is asked for by its exact version may come from PIP_ARGS' index or folder.
_TORCH = "torch==2.13.0"
_LLAMA = "llama-cpp-python==0.3.36"
_CMAKE = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_OPENSSL=OFF"),
    *(f"-DLLAMA_{part}=OFF" for part in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "BUILD_UI", "USE_PREBUILT_UI")),
)


class InstallError(RuntimeError):
    """A peer that is not there; the message is the reason in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment, and what goes into it."""

    name: str
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    """Came with the others and must go."""
    is_llama: bool = False


ENVIRONMENTS: Mapping[str, Environment] = {
    # optimum-intel brings a torchvision that need not fit this torch; text models do without.
    "openvino": Environment(
        name="openvino",
        packages=(_TORCH, "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0"),
        unwanted=("torchvision",),
    ),
    "llama": Environment(
        name="llama",
        packages=("numpy", "safetensors", "gguf==0.19.0", "typing-extensions", "diskcache", "jinja2"),
        is_llama=True,
    ),
    "torch": Environment(name="torch", packages=(_TORCH, "transformers==5.23.0", "ctranslate2==4.8.5")),
}


def install(environment: Environment, folder: Path) -> Path:
    """Makes it where it is not there or of other versions; gives its Python. Raises InstallError."""
    home = folder / environment.name
    python = home / "bin/python"
    stamp = home / "made-of.json"
    built = [_LLAMA, *_CMAKE] if environment.is_llama else []
    made_of = json.dumps([environment.packages, environment.unwanted, built])
    if stamp.exists() and stamp.read_text() == made_of:
        return python
    print(f"installing {environment.name}: {' '.join(environment.packages)}", file=sys.stderr, flush=True)
    _call([sys.executable, "-m", "venv", home])
    torch = [package for package in environment.packages if package == _TORCH]
    for packages in filter(None, (torch, environment.packages)):
        _pip(python, "install", *packages)
    if environment.unwanted:
        _pip(python, "uninstall", "-y", *environment.unwanted)
    if environment.is_llama:
        _build_llama(python, home)
    stamp.write_text(made_of)
    return python


def llama_library(folder: Path) -> Path:
    """Where libllama and llama-server are."""
    return (folder / "llama/build/bin").resolve()


def _build_llama(python: Path, home: Path) -> None:
    """Idle priority: it takes minutes, and other work may go on."""
    source = _source(python, home)
    project = source / "vendor/llama.cpp"
    _call(["nice", "-n", "19", "cmake", "-S", project, "-B", home / "build", *_CMAKE])
    jobs = str(os.cpu_count() or 1)
    _call(["nice", "-n", "19", "cmake", "--build", home / "build", "--target", "llama-server", "-j", jobs])
    _pip(python, "install", "--no-deps", str(source), CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF")


def _source(python: Path, home: Path) -> Path:
    """The unpacked source distribution of llama-cpp-python."""
    folder = home / "source"
    unpacked = folder / _LLAMA.replace("==", "-").replace("-", "_", 2)
    if not (unpacked / "CMakeLists.txt").exists():
        _pip(python, "download", "--no-deps", "--no-binary", "llama-cpp-python", "-d", str(folder), _LLAMA)
        with tarfile.open(f"{unpacked}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return unpacked


def _pip(python: Path, *arguments: str, **environment: str) -> None:
    extra = shlex.split(os.environ.get("PIP_ARGS", "")) if arguments[0] != "uninstall" else []
    command: list[str | Path] = [
        python,
        "-m",
        "pip",
        arguments[0],
        "-q",
        "--disable-pip-version-check",
        *extra,
        *arguments[1:],
    ]
    _call(command, environment)


def _call(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise InstallError(f"{Path(command[0]).name} cannot be run: {error.strerror}") from None
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if "rror" in line] or ["no reason given"]
        raise InstallError(f"{Path(command[0]).name} {' '.join(map(str, command[1:4]))}: {lines[-1].strip()[:200]}")
