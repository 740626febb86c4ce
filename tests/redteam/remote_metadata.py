"""A hub or mirror that lies about a model, and `inkstream check org/name` on it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

from tests.redteam.attack import Setting, attack
from tests.redteam.service import REPOSITORY

MEMORY_SLACK = 160 << 20
"""Bytes that a try may take beyond the honest one; model info is kept once as text and once parsed."""
DISK_SLACK = 1 << 20
SECONDS = 30.0
_PATHS = ("../evil", "../../../evil", "/tmp/redteam-evil", "..", "a/../../evil", "a\\..\\evil", "evil\0", "evil\n")
_ODD: tuple[Any, ...] = (
    "",
    "9",
    -1,
    True,
    1.5,
    None,
    [],
    {},
    10**30,
    "a" * 39,
    "A" * 40,
    "\uff11" * 40,
    "x" * 100_000,
    ["a" * 40],
)


@dataclass(slots=True)
class Lie:
    """What a hub changes in the honest model info, or in the body of one file."""

    text: str
    """Describes the lie."""
    info: Callable[[dict[str, Any]], bytes]
    body: Callable[[bytes], Iterator[bytes]] | None = None
    """Chunks of model.safetensors, in place of its content."""
    padding: int = 0
    """Spaces after the model info, which are sent in pieces: a process inherits the peak memory of its parent."""


@dataclass(slots=True)
class Hub:
    """The repository org/model, from files of a weights directory."""

    files: dict[str, bytes]
    lie: Lie = field(default_factory=lambda: Lie("none", lambda info: json.dumps(info).encode()))

    def info(self) -> dict[str, Any]:
        """The honest model info."""
        files = []
        for name, content in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": blob}
            if name.endswith(".safetensors"):
                entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
            files.append(entry)
        return {"id": "org/model", "sha": "0123456789" * 4, "siblings": files, "cardData": {}}


def draw(rng: Random) -> Lie:
    """A lie about a field, about the info as a whole, or about the length of a body."""
    kind = rng.choice(["sha", "blobId", "size", "rfilename", "lfs", "text", "body", "body"])
    value = rng.choice([*_PATHS, *_PATHS, *_ODD])
    if kind == "body":
        return _body(rng)
    if kind == "text":
        return _text(rng)

    def change(info: dict[str, Any]) -> bytes:
        entry = rng.choice(info["siblings"])
        if kind == "sha":
            info["sha"] = value
        elif kind == "lfs":
            weights = next(entry for entry in info["siblings"] if "lfs" in entry)
            weights["lfs"][key] = value
        elif kind == "rfilename":
            name = value if value not in _PATHS else f"{value}/evil.json" if value == ".." else f"{value}.json"
            info["siblings"].append({**entry, "rfilename": name})
        else:
            config = next(entry for entry in info["siblings"] if entry["rfilename"] == "config.json")
            config[kind] = value
        return json.dumps(info).encode()

    key = rng.choice(["sha256", "size"])
    return Lie(f"{kind} {key if kind == 'lfs' else ''} = {value!r:.60}", change)


def _text(rng: Random) -> Lie:
    if rng.random() < 0.3:
        return Lie("600 MB of model info", lambda info: json.dumps(info).encode(), padding=600 << 20)
    text = rng.choice(["[" * 200_000, "NaN", "\ud800", "[[]," * 500_000])

    def change(info: dict[str, Any]) -> bytes:
        return json.dumps(info).replace("{}", text).encode(errors="surrogatepass")

    return Lie(f"model info with {text[:4]!r} x {len(text)}", change)


def _body(rng: Random) -> Lie:
    extra = rng.choice([1, 1000, 64 << 20, 400 << 20, -1, -1000])

    def body(content: bytes) -> Iterator[bytes]:
        yield content if extra > 0 else content[:extra]
        for position in range(0, max(extra, 0), 1 << 20):
            yield b"x" * min(1 << 20, extra - position)

    return Lie(f"model.safetensors with {extra:+d} bytes", lambda info: json.dumps(info).encode(), body)


@contextmanager
def _serving(hub: Hub) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

        def do_GET(self) -> None:
            path, self.close_connection = self.path.partition("?")[0], True
            name = path.rpartition("/")[2]
            with suppress(OSError):
                if path.startswith("/api/"):
                    padding = (b" " * (1 << 20) for _ in range(hub.lie.padding >> 20))
                    self._send(chain([hub.lie.info(hub.info())], padding))
                elif name in hub.files:
                    body = hub.lie.body if name.endswith(".safetensors") else None
                    self._send(body(hub.files[name]) if body else iter([hub.files[name]]))
                else:
                    self.send_error(404)

        def _send(self, chunks: Iterator[bytes]) -> None:
            """Without a length: the body ends with the connection."""
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            for chunk in chunks:
                self.wfile.write(chunk)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one `check` did."""

    code: int
    output: str
    memory: int
    seconds: float
    escaped: list[str]
    written: int


def _check(url: str, folder: Path, seconds: float = SECONDS) -> Outcome:
    """Runs `check org/model` for at most these seconds, with an empty HF_HOME four levels below the folder."""
    home = folder / "a/b/c/home"
    home.mkdir(parents=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "INKSTREAM_"))}
    with tempfile.TemporaryFile() as output:
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "app", "check", "org/model"], cwd=REPOSITORY, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, env={**kept, "HF_ENDPOINT": url, "HF_HOME": str(home), "NO_PROXY": "*"},
        )  # fmt: skip
        watchdog = threading.Timer(seconds, process.kill)
        watchdog.start()
        _, status, usage = os.wait4(process.pid, 0)
        watchdog.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        took = time.monotonic() - began
        output.seek(0)
        text = output.read().decode(errors="replace")
    inside = [path for path in home.rglob("*") if path.is_file() and not path.is_symlink()]
    parents = {folder / part for part in ("a", "a/b", "a/b/c")}
    escaped = [str(path) for path in folder.rglob("*") if path not in parents and not path.is_relative_to(home)]
    written = sum(path.stat().st_size for path in inside)
    return Outcome(process.returncode, text, usage.ru_maxrss << 10, took, escaped, written)


def find_problem(outcome: Outcome, honest: Outcome, size: int) -> str:
    """What a lie achieved; empty if it was refused."""
    if outcome.escaped or Path("/tmp/redteam-evil").exists():
        return f"files outside HF_HOME: {outcome.escaped[:3]}"
    if outcome.seconds >= SECONDS:
        return f"check does not end within {SECONDS:.0f} s"
    if outcome.code == 0:
        return "check accepts the model"
    if outcome.code < 0 or "Traceback" in outcome.output:
        return f"check ends with {outcome.code}: {outcome.output[-200:]}"
    if outcome.written > size + DISK_SLACK:
        return f"{outcome.written} bytes on disk for a model of {size}"
    if outcome.memory > honest.memory + MEMORY_SLACK:
        return f"{outcome.memory >> 20} MiB of memory, {honest.memory >> 20} for the honest model"
    return ""


@attack("remote-metadata", share=14.0, needs_launcher=True)
def remote_metadata(setting: Setting) -> None:
    """A hub that names paths as hashes, sends other sizes than it names, and never stops."""
    launcher, report = setting.own_launcher, setting.report
    report.limit = "one line, nothing outside HF_HOME"
    names = ("config.json", "model.safetensors", "tokenizer.json")
    hub = Hub({name: (launcher.weights / name).read_bytes() for name in names})
    size = sum(map(len, hub.files.values()))
    with _serving(hub) as url:
        # The first check may build the native kernels.
        honest = _check(url, Path(tempfile.mkdtemp(dir=launcher.directory)), 10 * SECONDS)
        if honest.code != 0:
            report.add("high", f"the honest hub is refused: {honest.output[-200:]}", "check org/model")
        for _ in setting.tries():
            hub.lie = draw(setting.rng)
            outcome = _check(url, Path(tempfile.mkdtemp(dir=launcher.directory)))
            if problem := find_problem(outcome, honest, size):
                report.add("high", problem, f"HF_ENDPOINT with {hub.lie.text}; inkstream check org/model")
    report.worst = f"{report.found} of {report.tries} lies had an effect"
