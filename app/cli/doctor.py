"""inkstream doctor: what this machine has, and what keeps the service from running or makes it slow.

Imports only what needs no installed package, so that it works where an installation is broken; other parts of the
project are imported by name, inside checks that survive their failure.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import http.client
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from app import VERSION
from app.common.cpu_topology import read_topology
from app.engine.cpu.toolchain.builder import find, find_compiler
from app.engine.cpu.toolchain.cpu_target import BuildError, UnsupportedCpu, level_of
from app.engine.cpu.toolchain.library_cache import PACKAGED, cache_directory, read_metadata
from model.command_line import OneLineParser
from model.machine import INSTALL_TORCH

Level = Literal["ok", "slow", "broken", "unknown"]
_MARKS: dict[Level, str] = {"ok": "  ", "slow": "! ", "broken": "x ", "unknown": "? "}
_SMI_SECONDS, _PORT_SECONDS = 3.0, 0.5
_GIB = 1 << 30
_LEAST_DISK, _LEAST_FILES, _FEW_FILES = 1 * _GIB, 128, 1024
_NEEDED = ("numpy", "safetensors", "tokenizers", "fastapi", "uvicorn", "httptools", "pydantic",
           "pydantic-settings", "msgspec", "jinja2", "prometheus-client")  # fmt: skip
_OPTIONAL = ("torch", "uvloop", "llguidance", "triton")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CXX")
_SECRET = re.compile(r"_(API_KEY|TOKEN|SECRET|PASSWORD)", re.IGNORECASE)
_INSTALL = "make install (without make: pip install -e .)"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    topic: str
    text: str
    level: Level = "ok"
    remedy: str = ""
    """What to do, with the command; empty if nothing needs to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the checks look at; tests replace it."""

    root: Path = Path("/")
    """Directory of proc and sys."""
    environment: Mapping[str, str]
    weights: Path
    port: int

    def read(self, name: str) -> str:
        """The text of a file below the root; empty if it cannot be read."""
        try:
            return (self.root / name).read_text(errors="replace")
        except OSError:
            return ""


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 the service can run, 1 it cannot, 2 bad arguments."""
    options = build_parser().parse_args(argv)
    weights = options.weights or os.environ.get("INKSTREAM_WEIGHTS") or _default_weights()
    port = options.port if options.port is not None else _default_port(os.environ)
    findings = examine(Machine(environment=os.environ, weights=Path(weights), port=port))
    can_run = not any(finding.level == "broken" for finding in findings)
    if options.json:
        print(json.dumps({"version": VERSION, "can_run": can_run, "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        _print_report(findings, can_run)
    return 0 if can_run else 1


def build_parser() -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = OneLineParser(
        prog="inkstream doctor",
        description="Report what this machine has, and what keeps the service from running or makes it slow.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--weights", metavar="DIR", help="weights directory (default: INKSTREAM_WEIGHTS, or what serve takes)"
    )
    parser.add_argument(
        "--port", type=_port, metavar="N", help="port that the service would use (default: INKSTREAM_PORT, or 8000)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    return parser


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text[:6]) < 65536):
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 65535, not {text[:60]!r}")
    return int(text)


def _default_weights() -> Path:
    """The weights that serve would take; a folder weights if packages that tell are missing."""
    with contextlib.suppress(ImportError):
        return Path(importlib.import_module("app.common.settings").default_weights())
    return Path("weights")


def _default_port(environment: Mapping[str, str]) -> int:
    try:
        return _port(environment.get("INKSTREAM_PORT") or "8000")
    except argparse.ArgumentTypeError:
        return 8000  # the check of the variables reports it


def _print_report(findings: Sequence[Finding], can_run: bool) -> None:
    print(f"inkstream {VERSION}")
    for finding in findings:
        text = "".join(c if c.isprintable() else " " for c in finding.text)
        print(f"{_MARKS[finding.level]}{finding.topic:<10} {text}")
        if finding.remedy:
            print(f"  {'':<10} -> {finding.remedy}")
    counts = {level: sum(finding.level == level for finding in findings) for level in _MARKS}
    print("\nThe service can run." if can_run else f"\nThe service cannot run: {counts['broken']} marked x.", end="")
    print(f" Slow or limited: {counts['slow']} marked !." if counts["slow"] else "")


def examine(machine: Machine) -> list[Finding]:
    """All findings. A check that fails is a finding itself: the report matters most on odd machines."""
    findings = list[Finding]()
    for topic, check in _CHECKS.items():
        try:
            findings += check(machine)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            findings.append(Finding(topic, f"could not be checked ({reason})", "unknown"))
    return findings


def _system(machine: Machine) -> Iterator[Finding]:
    name = re.search(r'^PRETTY_NAME="?([^"\n]*)', machine.read("etc/os-release"), re.MULTILINE)
    container = ", in a container" if (machine.root / ".dockerenv").exists() else ""
    text = f"{platform.system()} {platform.release()} {platform.machine()}, {name[1] if name else 'unknown'}{container}"
    is_supported = platform.system() == "Linux"
    remedy = "" if is_supported else "inkstream is tested on Linux: docker compose up --build runs it there"
    yield Finding("system", text, "ok" if is_supported else "slow", remedy)
    yield Finding("python", f"{platform.python_version()}, {sys.executable}")


def _cpu(machine: Machine) -> Iterator[Finding]:
    info = machine.read("proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.*)", info, re.MULTILINE)
    name = model[1].strip() if model else platform.processor() or "unknown"
    try:
        level = level_of(platform.machine(), platform.system(), info).name
        yield Finding("cpu", f"{name}, level {level}")
    except UnsupportedCpu as error:
        has_torch = _version("torch") is not None
        remedy = "nothing to install: torch computes; a newer CPU is faster" if has_torch else INSTALL_TORCH
        yield Finding("cpu", f"{name}: {error}", "slow" if has_torch else "broken", remedy)
    topology, all_cpus = read_topology(machine.root), os.cpu_count() or 1
    usable = topology.n_cpus
    limit = f"; affinity or the cgroup's quota allows {usable} of {all_cpus} CPUs" if usable < all_cpus else ""
    yield Finding("cores", f"{topology}{limit}; computes with {topology.compute_threads} threads by default")
    threads = machine.environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) < usable:
        yield Finding("threads", f"OMP_NUM_THREADS={threads} leaves cores idle", "slow", "unset OMP_NUM_THREADS")
    load = machine.read("proc/loadavg").split()[:1]
    if load and float(load[0]) > usable:
        remedy = "see which in top; share the machine with --threads N"
        yield Finding("load", f"other programs use the cores (load {load[0]} on {usable})", "slow", remedy)


def _memory(machine: Machine) -> Iterator[Finding]:
    sizes = {
        name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", machine.read("proc/meminfo"), re.M)
    }
    if "MemTotal" not in sizes:
        yield Finding("memory", "unknown: there is no /proc/meminfo", "unknown")
        return
    free, limit = sizes.get("MemAvailable", sizes["MemTotal"]), machine.read("sys/fs/cgroup/memory.max").strip()
    is_limited = limit.isdecimal() and int(limit) < sizes["MemTotal"]
    if is_limited:
        used = machine.read("sys/fs/cgroup/memory.current").strip()
        free = min(free, max(0, int(limit) - (int(used) if used.isdecimal() else 0)))
    text = f"{_size(free)} free of {_size(sizes['MemTotal'])}" + (
        f", cgroup limit {_size(int(limit))}" if is_limited else ""
    )
    weights = sum(_bytes(path) for path in machine.weights.glob("*.safetensors"))
    if weights > free:
        remedy = "serve smaller weights, free memory, or try --quantize int8"
        yield Finding("memory", f"{text}, and the weights have {_size(weights)}", "broken", remedy)
    else:
        yield Finding("memory", text)


def _disk(machine: Machine) -> Iterator[Finding]:
    places = {"here": Path.cwd(), "temporary": Path(machine.environment.get("TMPDIR") or "/tmp")}  # nosec B108
    free = {name: shutil.disk_usage(path).free for name, path in places.items() if path.exists()}
    text = ", ".join(f"{_size(size)} free ({name})" for name, size in free.items())
    if any(size < _LEAST_DISK for size in free.values()):
        yield Finding("disk", text, "slow", "free some: an installation and a training run need a gigabyte or more")
    else:
        yield Finding("disk", text)


def _files(_: Machine) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else max(soft, _FEW_FILES)
    if most < _LEAST_FILES:
        yield Finding(
            "files", f"at most {most} open files; the service needs {_LEAST_FILES}", "broken", "ulimit -n 4096"
        )
    elif most < _FEW_FILES:
        yield Finding("files", f"at most {most} open files, so fewer connections", "slow", "ulimit -n 4096")


def _compiler() -> tuple[str, str]:
    """Version of the C++ compiler, or nothing and why there is none."""
    try:
        return find_compiler().version, ""
    except BuildError as error:
        return "", str(error).partition(":")[0]


def _kernels(machine: Machine) -> Iterator[Finding]:
    compiler, why = _compiler()
    torch_computes = "torch computes, several times slower" if _version("torch") else ""
    directory = _cache_directory(machine)
    library = find(directory)
    if compiler:
        yield Finding("compiler", compiler)
    elif library:
        yield Finding("compiler", "none, and none is needed: the kernels are built")
    else:
        remedy = "apt install g++, then inkstream compile"
        yield Finding(
            "compiler",
            f"none, so {torch_computes or 'nothing can compute'} ({why})",
            "slow" if torch_computes else "broken",
            remedy,
        )
    if library:
        details = read_metadata(library) or {}
        yield Finding("kernels", f"built for this CPU, {int(details.get('bytes', 0)) >> 10} KiB: {library}")
    elif compiler:
        text = f"not built, so {torch_computes or 'the first start takes a minute longer'} ({directory or PACKAGED})"
        yield Finding("kernels", text, "slow", "inkstream compile (a minute or so)")
    if directory and not library and not os.access(_existing(directory), os.W_OK | os.X_OK):
        remedy = "export INKSTREAM_CACHE_DIR=DIR, a directory that you may write"
        yield Finding("cache", f"{directory} cannot be written, so the kernels cannot be kept", "slow", remedy)


def _packed(machine: Machine) -> Iterator[Finding]:
    cache = importlib.import_module("app.engine.cpu.packed_cache")
    directory = _cache_directory(machine)
    number, size = cache.describe(directory) if directory else (0, 0)
    if directory and number:
        yield Finding(
            "packed", f"weights of {number} models, {_size(size)}; rm -r {directory / cache.FOLDER} clears them"
        )


def _cache_directory(machine: Machine) -> Path | None:
    requested = machine.environment.get("INKSTREAM_CACHE_DIR")
    return cache_directory(Path(requested) if requested else None, machine.environment)


def _packages(machine: Machine) -> Iterator[Finding]:
    versions = {name: _version(name) for name in (*_NEEDED, *_OPTIONAL)}
    missing = [name for name in _NEEDED if versions[name] is None]
    if missing:
        yield Finding("packages", f"missing: {', '.join(missing)}", "broken", _INSTALL)
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version and name != "torch")
    yield Finding("packages", installed or "none")
    if versions["torch"]:
        cuda = _cuda_of_torch()
        yield Finding("torch", f"{versions['torch']}, " + (f"built for CUDA {cuda}" if cuda else "built for CPUs"))
    else:
        text = "not installed, so only the native kernels compute; GPUs, check and train need it"
        can_compute = find(_cache_directory(machine)) or _compiler()[0]
        yield Finding("torch", text, *(() if can_compute else ("broken", INSTALL_TORCH)))
    yield from _gpus(machine, has_cuda=versions["torch"] is not None and _cuda_of_torch() is not None)


def _cuda_of_torch() -> str | None:
    """The CUDA version that torch was built for, read from its files: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version").with_suffix(".py") if spec and spec.origin else None
    found = re.search(r"^cuda\b[^=\n]*=\s*'([^']+)'", file.read_text(), re.MULTILINE) if file else None
    return found[1] if found else None


def _gpus(machine: Machine, *, has_cuda: bool) -> Iterator[Finding]:
    driver = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", machine.read("proc/driver/nvidia/version"))
    program = shutil.which("nvidia-smi", path=machine.environment.get("PATH", ""))
    if program is None:
        if driver:
            yield Finding("gpu", f"driver {driver[1]} is loaded, but nvidia-smi is missing", "unknown")
        else:
            yield Finding("gpu", "none (no NVIDIA driver)")
        return
    query = [program, "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, errors="replace", timeout=_SMI_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        yield Finding(
            "gpu", f"nvidia-smi does not answer within {_SMI_SECONDS:g} s", "slow", "restart the driver or the machine"
        )
        return
    except OSError as error:
        yield Finding("gpu", f"nvidia-smi cannot be run ({error.strerror})", "slow", "reinstall the NVIDIA driver")
        return
    lines = [line.strip() for line in done.stdout.splitlines() if line.count(",") == 3]
    if done.returncode or not lines:
        said = (done.stderr or done.stdout).strip().partition("\n")[0][:160]
        remedy = "load or reinstall the NVIDIA driver (sudo modprobe nvidia); until then --device cpu"
        yield Finding("gpu", f"nvidia-smi fails ({said or f'exit code {done.returncode}'})", "slow", remedy)
        return
    for line in lines:
        name, total, used, version = (part.strip() for part in line.split(","))
        yield Finding("gpu", f"{name}, {used} of {total} used, driver {version}")
    if not has_cuda:
        remedy = 'make install PIP_ARGS="--index-url URL", where URL has CUDA builds of torch (docs/gpu.md)'
        yield Finding("gpu", "torch is built for CPUs and does not use it", "slow", remedy)


def _port_of(machine: Machine) -> Iterator[Finding]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", machine.port))
            yield Finding("port", f"{machine.port} is free")
            return
        except OSError as error:
            if error.errno == errno.EACCES:
                remedy = "choose one above 1023: make serve PORT=8000"
                yield Finding("port", f"{machine.port} needs more privileges", "broken", remedy)
                return
            if error.errno != errno.EADDRINUSE:
                raise
    if status := _service_status(machine.port):
        yield Finding(
            "port", f"an inkstream service answers at {machine.port} ({status}); another one needs another port"
        )
    else:
        other = machine.port + 1 if machine.port < 65535 else 8000
        yield Finding("port", f"{machine.port} is taken by another program", "broken",
                      f"make serve PORT={other} (inkstream serve --port {other})")  # fmt: skip


def _service_status(port: int) -> str | None:
    """What the health check of a service at this port says; None if no inkstream service answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PORT_SECONDS)
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError), contextlib.closing(connection):
        connection.request("GET", "/health/ready")
        answer = json.loads(connection.getresponse().read(4096))
        if isinstance(answer, dict) and "phase" in answer:
            return str(answer.get("status"))
    return None


def _weights(machine: Machine) -> Iterator[Finding]:
    layout = importlib.import_module("model.checkpoint.tensor_index")
    files = importlib.import_module("model.files")
    hub = importlib.import_module("model.checkpoint.hub")
    try:
        if model := hub.hub_model(str(machine.weights)):
            yield Finding("weights", f"{model}, a model of the Hugging Face Hub; inkstream check {model} downloads it")
            return
        layout.check_layout(machine.weights)
        config = files.read_json(machine.weights / "config.json")
        for path in sorted(machine.weights.glob("*.safetensors")):
            with files.regular_file(path).open("rb") as file:
                files.reject_lfs_pointer(path, file.read(64))
    except (ValueError, OSError) as error:
        remedy = "name another directory: make serve WEIGHTS=DIR (inkstream serve --weights DIR)"
        yield Finding("weights", str(error), "broken", remedy)
        return
    size = sum(_bytes(path) for path in machine.weights.glob("*.safetensors"))
    kind = str(config.get("model_type", "unknown"))[:60]
    is_included = machine.weights == importlib.import_module("app.common.settings").INCLUDED_WEIGHTS
    included = ", the model that comes with inkstream" if is_included else ""
    yield Finding(
        "weights",
        f"{machine.weights}{included}: {kind}, {_size(size)}; inkstream check {machine.weights} reads all of it",
    )


def _variables(machine: Machine) -> Iterator[Finding]:
    names = sorted(name for name in machine.environment if name.startswith("INKSTREAM_"))
    shown = [name for name in (*names, *_THREAD_VARIABLES) if name in machine.environment]
    values = (f"{name}={'(hidden)' if _SECRET.search(name) else machine.environment[name]}" for name in shown)
    yield Finding("variables", ", ".join(values) or "no INKSTREAM_* variables")
    serve = importlib.import_module("app.cli.serve")
    try:
        serve.read_settings({})
    except serve.StartError as error:
        yield Finding("variables", str(error), "broken", "unset or correct it: docs/settings.md lists the settings")


_CHECKS: dict[str, Callable[[Machine], Iterator[Finding]]] = {
    "system": _system,
    "cpu": _cpu,
    "memory": _memory,
    "disk": _disk,
    "files": _files,
    "compiler": _kernels,
    "packed": _packed,
    "packages": _packages,
    "port": _port_of,
    "weights": _weights,
    "variables": _variables,
}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _existing(path: Path) -> Path:
    """The path itself, or the closest folder around it that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _size(number: int) -> str:
    return f"{number / _GIB:.1f} GiB" if number >= _GIB else f"{number / (1 << 20):.0f} MiB"
