"""Provisions peers: virtual environments from PyPI, and models in each peer's format. Created on first use.

llama.cpp comes as the source of llama-cpp-python: its own cmake project builds libllama for this CPU, which the binding
is pointed to, and llama-server, which the wheel lacks and which batches concurrent requests.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.shapes import Model

_ROOT = Path(__file__).parent.parent.parent
# The same torch everywhere. PIP_ARGS may name an index or folder to take this exact version from.
_TORCH = "torch==2.13.0"
_LLAMA = "llama-cpp-python==0.3.36"
_CMAKE = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_OPENSSL=OFF"),
    *(f"-DLLAMA_{part}=OFF" for part in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "BUILD_UI", "USE_PREBUILT_UI")),
)
_WEIGHT_FORMATS = {"bf16": "fp32", "f32": "fp32", "int8": "int8"}
"""OpenVINO rounds to its configured compute precision when it loads a model."""


class InstallError(RuntimeError):
    """A peer that cannot be installed; the message is the reason in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment and its packages."""

    name: str
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    """Packages to remove again, which others bring along."""
    is_llama: bool = False


ENVIRONMENTS: Mapping[str, Environment] = {
    # optimum-intel brings a torchvision that may not fit this torch, and that text models do not need.
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
    """Creates the environment if it is missing or has other versions. Returns its Python. Raises InstallError."""
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
    """Folder of libllama and llama-server."""
    return (folder / "llama/build/bin").resolve()


def _build_llama(python: Path, home: Path) -> None:
    """Builds with idle priority, since it takes minutes."""
    source = _source(python, home)
    project = source / "vendor/llama.cpp"
    _call(["nice", "-n", "19", "cmake", "-S", project, "-B", home / "build", *_CMAKE])
    jobs = str(os.cpu_count() or 1)
    _call(["nice", "-n", "19", "cmake", "--build", home / "build", "--target", "llama-server", "-j", jobs])
    _pip(python, "install", "--no-deps", str(source), CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF")


def _source(python: Path, home: Path) -> Path:
    """Unpacked source distribution of llama-cpp-python."""
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


class ConvertError(RuntimeError):
    """A model that a peer cannot convert; the message is the reason in the table."""


def convert(peer: str, model: Model, precision: str, *, python: Path, folder: Path) -> Path:
    """Path of the model in the peer's format, or the original for peers that read it. Raises ConvertError."""
    stem = f"{model.name}-{_fingerprint(model)}"
    if peer == "openvino":
        target = folder / f"{stem}-openvino-{_WEIGHT_FORMATS[precision]}"
        tool: list[str | Path] = [python.with_name("optimum-cli"), "export", "openvino", "--model", model.directory]
        task = ["--task", "text-generation-with-past", "--weight-format", _WEIGHT_FORMATS[precision]]
        return convert_once(target, [*tool, *task])
    if peer == "llama.cpp":
        target = folder / f"{stem}-{precision}.gguf"
        program: list[str | Path] = [python, "-m", "benchmarks.peers.adapters.write_gguf", model.directory]
        return convert_once(target, program, after=[precision])
    if peer == "ctranslate2":
        tool = [python.with_name("ct2-transformers-converter"), "--model", model.directory, "--output_dir"]
        return convert_once(folder / f"{stem}-ctranslate2", tool)
    return model.directory


def _fingerprint(model: Model) -> str:
    """Hash of the weights, since a name may be reused for other weights."""
    content = (model.directory / "model.safetensors").read_bytes()
    return hashlib.sha256(content).hexdigest()[:12]


def convert_once(target: Path, command: Sequence[str | Path], after: Sequence[str] = ()) -> Path:
    """Runs the command on a temporary path next to the target, and renames it once the command has succeeded."""
    if target.exists():
        return target
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"part-{target.name}"
    shutil.rmtree(part, ignore_errors=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*command, part, *after], cwd=_ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode or not part.exists():
        lines = [line for line in done.stderr.splitlines() if "rror" in line] or [f"exit code {done.returncode}"]
        raise ConvertError(f"the conversion failed: {lines[-1].strip()[:200]}")
    part.rename(target)
    return target
