"""The two compared services on free local ports: this one as delivered, and llama.cpp's server."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from app.common.settings import Settings
from benchmarks.peers.child import plain_environment
from benchmarks.peers.crew import Workshop
from benchmarks.peers.install import llama_library
from benchmarks.peers.shapes import Model

_START_SECONDS = 300
_ROOT = Path(__file__).parent.parent.parent
_DTYPES = {"bf16": "bfloat16", "f32": "float32", "int8": "bfloat16"}
_STREAMS = 32


class ServiceError(RuntimeError):
    """A service that does not start, or does not do what is asked; the message is the reason in the table."""


@dataclass(frozen=True, slots=True)
class Service:
    """It runs and answers."""

    url: str


@contextmanager
def our_service(shop: Workshop, model: Model, precision: str) -> Iterator[Service]:
    """The whole service, with its own defaults. Raises ServiceError."""
    port = _free_port()
    command = [sys.executable, "-m", "app", "serve", "--weights", str(model.directory), "--device", "cpu"]
    flags = ["--dtype", _DTYPES[precision], "--port", str(port), "--threads", str(shop.threads)]
    if precision == "int8":
        if "quantize" not in Settings.model_fields:
            raise ServiceError("this build has no --quantize int8")
        flags += ["--quantize", "int8"]
    with _running([*command, *flags], port, "/health/ready", shop.folder / "logs/our-service.log") as service:
        yield service


@contextmanager
def llama_server(shop: Workshop, model: Model, precision: str) -> Iterator[Service]:
    """As many slots as there are streams at most; its cache of old prompts, which costs time here, is off.

    Raises InstallError, ConvertError, ServiceError.
    """
    path, port = shop.converted("llama.cpp", model, precision), _free_port()
    context = _STREAMS * (-(-shop.length // 256) * 256)
    command = [str(llama_library(shop.folder) / "llama-server"), "--model", str(path), "--port", str(port)]
    flags = ["--parallel", str(_STREAMS), "--ctx-size", str(context), "--threads", str(shop.threads)]
    with _running(
        [*command, *flags, "--cache-ram", "0"], port, "/health", shop.folder / "logs/llama-server.log"
    ) as service:
        yield service


@contextmanager
def _running(command: Sequence[str], port: int, route: str, log: Path) -> Iterator[Service]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=_ROOT, env=plain_environment(), stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + _START_SECONDS
        url = f"http://127.0.0.1:{port}"
        while not _answers(url + route):
            if process.poll() is not None or time.monotonic() > deadline:
                lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
                raise ServiceError(f"it does not start: {lines[-1].strip()[:160]}")
            time.sleep(0.1)
        yield Service(url)
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as response:  # nosec B310
            return bool(response.status == 200)
    except (URLError, OSError):
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
