"""inkstream doctor: what this machine has, and what keeps the service from running or makes it slow.

Imports only what needs no installed package, so that it works where an installation is broken; other parts of the
project are imported by name, inside checks that survive their failure.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from app.cli.compile import PlainParser
from app.common.cpu_topology import read_topology
from app.common.operating_system import why_no_cuda
from app.common.version import VERSION
from app.engine.cpu.toolchain.builder import find, find_compiler
from app.engine.cpu.toolchain.cpu_target import BuildError, UnsupportedCpu, this_level
from model.cgroups import memory_limits
from model.machine import INSTALL_TORCH, describe_cpu, free_memory, has_native_bfloat16

Level = Literal["ok", "slow", "broken", "unknown"]
_MARKS: dict[Level, str] = {"ok": "  ", "slow": "! ", "broken": "x ", "unknown": "? "}
_SMI_SECONDS = 3.0
_NEEDED = ("numpy", "safetensors", "tokenizers", "fastapi", "uvicorn", "httptools", "pydantic",
           "pydantic-settings", "msgspec", "jinja2", "prometheus-client")  # fmt: skip
_OPTIONAL = ("torch", "uvloop", "llguidance", "triton")
_SHOWN = re.compile(r"INKSTREAM_\w*|OMP_\w+|MKL_NUM_THREADS|CUDA_VISIBLE_DEVICES|CXX")
_SECRET = re.compile(r"_(API_KEY|TOKEN|SECRET|PASSWORD)", re.IGNORECASE)
_INSTALL = "make install (without make: pip install -e .)"

Given = Mapping[str, Any]
"""Settings that flags gave."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    topic: str
    text: str
    level: Level = "ok"
    remedy: str = ""
    """What to do, with the command; empty if nothing needs to be done."""


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 the service can run, 1 it cannot, 2 bad arguments."""
    options = build_parser().parse_args(argv)
    given = {"weights": options.weights, "port": options.port}
    findings = examine({name: value for name, value in given.items() if value is not None})
    can_run = not any(finding.level == "broken" for finding in findings)
    if options.json:
        print(json.dumps({"version": VERSION, "can_run": can_run, "findings": [asdict(f) for f in findings]}, indent=1))
        return 0 if can_run else 1
    print(f"inkstream {VERSION}")
    for finding in findings:
        text = "".join(c if c.isprintable() else " " for c in finding.text)
        print(f"{_MARKS[finding.level]}{finding.topic:<10} {text}")
        if finding.remedy:
            print(f"  {'':<10} -> {finding.remedy}")
    print("\nThe service can run." if can_run else "\nThe service cannot run: see the lines marked x.")
    return 0 if can_run else 1


def build_parser() -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = PlainParser(
        prog="inkstream doctor",
        description="Report what this machine has, and what keeps the service from running or makes it slow.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--weights", metavar="DIR", help="weights directory (default: INKSTREAM_WEIGHTS, or what serve takes)"
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="port that the service would use (default: INKSTREAM_PORT, or 8000)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    return parser


def examine(given: Given) -> list[Finding]:
    """All findings. A check that fails is a finding itself: the report matters most on odd machines."""
    findings = list[Finding]()
    for topic, check in _CHECKS.items():
        try:
            findings += check(given)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            findings.append(Finding(topic, f"could not be checked ({reason})", "unknown"))
    return findings


def _machine(_: Given) -> Iterator[Finding]:
    text = f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    yield Finding("system", f"{text} ({sys.executable})")
    topology = read_topology()
    yield Finding("cpu", f"{describe_cpu(topology.compute_threads)} of {topology}")
    chosen = "bfloat16" if has_native_bfloat16() else "float32, because it multiplies no bfloat16"
    yield Finding("dtype", f"--dtype auto computes on this CPU in {chosen}")
    limits = "".join(f", {limit.name} may use {_size(limit.limit)}" for limit in memory_limits())
    yield Finding("memory", f"{_size(free_memory())} free{limits}")


def _packages(_: Given) -> Iterator[Finding]:
    versions = {name: _version(name) for name in (*_NEEDED, *_OPTIONAL)}
    yield Finding("packages", ", ".join(f"{name} {version}" for name, version in versions.items() if version) or "none")
    if missing := [name for name in _NEEDED if versions[name] is None]:
        yield Finding("packages", f"missing: {', '.join(missing)}", "broken", _INSTALL)


def _kernels(_: Given) -> Iterator[Finding]:
    """The native kernels, or what computes without them."""
    has_torch = _version("torch") is not None
    level: Level = "slow" if has_torch else "broken"
    instead = "torch computes, several times slower" if has_torch else "nothing can compute"
    try:
        target = this_level().name
        if library := find():
            yield Finding("kernels", f"built for this CPU ({target}): {library}")
        else:
            compiler = find_compiler().version
            yield Finding("kernels", f"not built; {compiler}", "slow", "inkstream compile (a minute or so)")
    except UnsupportedCpu as error:
        yield Finding("kernels", f"{error}, so {instead}", level, "" if has_torch else INSTALL_TORCH)
    except BuildError as error:
        text = f"not built ({str(error).partition(':')[0]}), so {instead}"
        yield Finding("kernels", text, level, "apt install g++, then inkstream compile")


def _gpus(_: Given) -> Iterator[Finding]:
    program = shutil.which("nvidia-smi")
    if program is None:
        yield Finding("gpu", "none (no NVIDIA driver)")
        return
    query = [program, "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        remedy = "load or reinstall the NVIDIA driver (sudo modprobe nvidia); until then --device cpu"
        yield Finding("gpu", f"nvidia-smi fails ({error})", "slow", remedy)
        return
    for line in output.splitlines():
        yield Finding("gpu", line)
    if _version("torch") is None:
        yield Finding("gpu", "torch, which uses it, is not installed", "slow", INSTALL_TORCH)
    elif problem := why_no_cuda():
        yield Finding("gpu", problem, "slow", "docs/gpu.md says how to install torch for it")


def _service(given: Given) -> Iterator[Finding]:
    """What `inkstream serve` checks before it starts."""
    shown = sorted(filter(_SHOWN.fullmatch, os.environ))
    values = (f"{name}={'(hidden)' if _SECRET.search(name) else os.environ[name]}" for name in shown)
    yield Finding("variables", ", ".join(values) or "none that the service reads")
    start, serve = importlib.import_module("app.start"), importlib.import_module("app.cli.serve")
    try:
        settings = serve.read_settings(given)
    except ValueError as error:
        yield Finding("settings", str(error), "broken", "docs/settings.md lists the settings")
        return
    size = _weights_size(settings.weights)
    found = f"{settings.weights}, {_size(size)}" if size else f"{settings.weights}"
    if size > free_memory():
        yield Finding("memory", "the weights are larger", "broken", "serve smaller weights, or try --quantize int8")
    for topic, check in {**start.CHECKS, "port": lambda settings: start.bind(settings).close()}.items():
        try:
            check(settings)
        except ValueError as error:
            # With --port the user asks whether a service can start there, beside the one that runs on the usual port.
            is_running = topic == "port" and "port" not in given and "another inkstream" in str(error)
            yield Finding(topic, str(error), "ok" if is_running else "broken")
        else:
            if topic == "weights":
                yield Finding("weights", f"{found}; inkstream check {settings.weights} reads all of it")
                if size:
                    yield from _cost(settings.weights)


def _weights_size(weights: Path) -> int:
    """Bytes of the weights; 0 if they cannot be found, which the check of the weights explains."""
    try:
        files = importlib.import_module("model.checkpoint.gguf_directory").find_gguf(weights)
    except ValueError:
        return 0
    return sum(path.stat().st_size for path in files or weights.glob("*.safetensors") if path.exists())


def _cost(directory: Path) -> Iterator[Finding]:
    """What one token costs; a config.json that asks for far more than the files have is broken."""
    stored = importlib.import_module("model.checkpoint.stored_weights")
    summary = importlib.import_module("model.checkpoint.model_summary")
    try:
        gguf = importlib.import_module("model.checkpoint.gguf_directory")
        with gguf.opened_weights(directory, with_tokenizer=False) as opened:
            config = stored.find_weights(opened, lambda _: "").config
        yield from (Finding(*line) for line in summary.cost_lines(config))
    except ValueError as error:
        yield Finding("weights", str(error), "broken", f"inkstream check {directory}")


_CHECKS: dict[str, Callable[[Given], Iterator[Finding]]] = {
    "machine": _machine,
    "packages": _packages,
    "kernels": _kernels,
    "gpu": _gpus,
    "service": _service,
}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
