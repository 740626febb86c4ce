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
from pathlib import Path

from benchmarks.service_process import ROOT
from benchmarks.shapes import Model

OURS = "inkstream"
# The same torch everywhere. PIP_ARGS may name an index or folder to take this exact version from.
_TORCH = "torch==2.13.0"
_LLAMA = "llama-cpp-python==0.3.36"
_CMAKE = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_OPENSSL=OFF"),
    *(f"-DLLAMA_{part}=OFF" for part in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "BUILD_UI", "USE_PREBUILT_UI")),
)
_NICE = ("nice", "-n", "19")
_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "openvino": (_TORCH, "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0"),
    "llama.cpp": ("numpy", "safetensors", "gguf==0.19.0", "typing-extensions", "diskcache", "jinja2"),
    "transformers": (_TORCH, "transformers==5.23.0"),
}
_WEIGHT_FORMATS = {"bf16": "fp32", "f32": "fp32", "int8": "int8"}
"""OpenVINO rounds to its configured compute precision when it loads a model."""


class PeerError(RuntimeError):
    """A peer that cannot be installed or started, or that fails; the message is the reason in the table."""


def install(peer: str, folder: Path) -> Path:
    """Creates the peer's environment if it is missing or has other versions. Returns its Python. Raises PeerError."""
    home, packages, is_llama = folder / peer, _PACKAGES[peer], peer == "llama.cpp"
    python, stamp = home / "bin/python", home / "made-of.json"
    made_of = json.dumps([packages, [_LLAMA, *_CMAKE] if is_llama else []])
    if stamp.exists() and stamp.read_text() == made_of:
        return python
    print(f"installing {peer}: {' '.join(packages)}", file=sys.stderr, flush=True)
    _call([sys.executable, "-m", "venv", home])
    if _TORCH in packages:
        _pip(python, "install", _TORCH)
    _pip(python, "install", *packages)
    if peer == "openvino":  # the installed torchvision may not fit this torch, and text models do not need it
        _call([python, "-m", "pip", "uninstall", "-q", "-y", "torchvision"])
    if is_llama:
        _build_llama(python, home)
    stamp.write_text(made_of)
    return python


def llama_library(folder: Path) -> Path:
    """Folder of libllama and llama-server."""
    return (folder / "llama.cpp/build/bin").resolve()


def _build_llama(python: Path, home: Path) -> None:
    """Builds with idle priority, since it takes minutes."""
    source = home / "source" / _LLAMA.replace("==", "-").replace("-", "_", 2)
    if not (source / "CMakeLists.txt").exists():
        _pip(python, "download", "--no-deps", "--no-binary", "llama-cpp-python", "-d", str(source.parent), _LLAMA)
        with tarfile.open(f"{source}.tar.gz") as archive:
            archive.extractall(source.parent, filter="data")
    _call([*_NICE, "cmake", "-S", source / "vendor/llama.cpp", "-B", home / "build", *_CMAKE])
    jobs = str(os.cpu_count() or 1)
    _call([*_NICE, "cmake", "--build", home / "build", "--target", "llama-server", "-j", jobs])
    _pip(python, "install", "--no-deps", str(source), CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF")


def _pip(python: Path, verb: str, *arguments: str, **environment: str) -> None:
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    _call([python, "-m", "pip", verb, "-q", "--disable-pip-version-check", *extra, *arguments], environment)


def _call(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
    """Runs a tool. Raises PeerError with the last line of its output that names an error."""
    variables = {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PeerError(f"{Path(command[0]).name} cannot be run: {error.strerror}") from None
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if "rror" in line] or ["no reason given"]
        raise PeerError(f"{Path(command[0]).name} {' '.join(map(str, command[1:4]))}: {lines[-1].strip()[:200]}")


def convert(peer: str, model: Model, precision: str, *, python: Path, folder: Path) -> Path:
    """Path of the model in the peer's format, or the original for peers that read it. Raises PeerError."""
    # A name may be reused for other weights.
    fingerprint = hashlib.sha256((model.directory / "model.safetensors").read_bytes()).hexdigest()[:12]
    stem = f"{model.name}-{fingerprint}"
    if peer == "openvino":
        weights = _WEIGHT_FORMATS[precision]
        tool: list[str | Path] = [python.with_name("optimum-cli"), "export", "openvino", "--model", model.directory]
        tool += ["--task", "text-generation-with-past", "--weight-format", weights]
        return convert_once(folder / f"{stem}-openvino-{weights}", tool)
    if peer == "llama.cpp":
        program: list[str | Path] = [python, "-m", "benchmarks.peers.adapters.write_gguf", model.directory, precision]
        return convert_once(folder / f"{stem}-{precision}.gguf", program)
    return model.directory


def convert_once(target: Path, command: Sequence[str | Path]) -> Path:
    """Runs the command on a temporary path next to the target, and renames it once the command has succeeded."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"part-{target.name}")
    shutil.rmtree(part, ignore_errors=True)
    _call([*command, part], {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
    if not part.exists():
        raise PeerError("the conversion wrote nothing")
    part.rename(target)
    return target
