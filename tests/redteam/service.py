"""The service under attack: started as a user would start it, or one that runs elsewhere."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from tests.redteam.http_client import Address, Answer, MalformedAnswer, call

REPOSITORY = Path(__file__).parents[2]
START_SECONDS = 90.0
INTERNALS = re.compile(
    r"Traceback \(most recent|panicked at|RUST_BACKTRACE|/rustc/|\.cargo/|site-packages/| at 0x[0-9a-f]{6,}"
)
"""What no log line may contain while the service runs."""


class ServiceFailed(Exception):
    """The service did not start, or ended by itself."""


@dataclass(slots=True)
class Target:
    """An address, the keys of two tenants, and, where we started the service, its process and its log."""

    address: Address
    keys: tuple[str | None, str | None]
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    _log_offset: int = 0

    @property
    def is_local(self) -> bool:
        """Whether files, signals and the log are within reach."""
        return self.process is not None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def call(self, method: str, path: str, *, tenant: int | None = 0, **more: Any) -> Answer:
        """A request with the key of that tenant; None sends no key."""
        return call(self.address, method, path, key=None if tenant is None else self.keys[tenant], **more)

    def is_alive(self) -> bool:
        """Whether the service answers, and its process runs."""
        if self.process is not None and self.process.poll() is not None:
            return False
        with suppress(OSError, MalformedAnswer):
            return call(self.address, "GET", "/health/live", timeout=15).status == 200
        return False

    def new_log(self) -> str:
        """Log lines since the last call."""
        if self.log is None:
            return ""
        with self.log.open("rb") as file:
            file.seek(self._log_offset)
            text = file.read()
        self._log_offset += len(text)
        return text.decode("utf-8", "replace")

    def settle(self, seconds: float = 20.0) -> bool:
        """Waits until requests are fast again, so that one attack does not spoil the next one's figures."""
        ends = time.monotonic() + seconds
        quick = 0
        while quick < 2 and time.monotonic() < ends:
            quick = quick + 1 if self._is_quick(ends - time.monotonic()) else 0
            time.sleep(0.05)
        return quick == 2

    def _is_quick(self, seconds: float) -> bool:
        began = time.monotonic()
        regex = f"[a-z ]{{1,{time.monotonic_ns() % 900 + 2}}}"
        guided = {"prompt": "a", "max_tokens": 1, "stream": False, "regex": regex}
        with suppress(OSError, MalformedAnswer):
            for tenant in (0, 1):
                self.call("POST", "/tokenize", tenant=tenant, body={"prompt": "It was. " * 900}, timeout=seconds)
                self.call("POST", "/complete", tenant=tenant, body=guided, timeout=seconds)
            return time.monotonic() - began < 0.6
        return False


@dataclass(slots=True)
class Launcher:
    """Starts services below one temporary directory and ends every one of them."""

    directory: Path
    weights: Path
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _logs: list[IO[bytes]] = field(default_factory=list)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "app", *arguments]

    def check(self, weights: Path, *, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """`inkstream check` of that directory."""
        return subprocess.run(
            self.command("check", str(weights)),
            cwd=REPOSITORY,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def keys_file(self, *quotas: tuple[str, ...]) -> tuple[Path, list[str]]:
        """A new file of keys, one for each set of quota flags."""
        path = self.directory / f"keys-{len(list(self.directory.glob('keys-*')))}.json"
        keys = []
        for number, flags in enumerate(quotas):
            command = self.command("keys", "add", f"tenant-{number}", "--keys-file", str(path), *flags)
            made = subprocess.run(
                command, cwd=REPOSITORY, env=_environment(), capture_output=True, text=True, check=True
            )
            keys.append(made.stdout.strip())
        return path, keys

    def start(self, *flags: str, weights: Path | None = None, quotas: tuple[tuple[str, ...], ...] = ((), ())) -> Target:
        """A service that is ready, with a key for each of two tenants.

        Raises:
            ServiceFailed: it ended, or was not ready in time; the text is the end of its log.
        """
        number = len(self._started)
        path, keys = self.keys_file(*quotas)
        log = self.directory / f"service-{number}.log"
        self._logs.append(log.open("wb"))
        process = subprocess.Popen(
            self.command(
                "serve", "--port", "0", "--weights", str(weights or self.weights), "--keys-file", str(path), *flags
            ),
            cwd=REPOSITORY,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._logs[-1],
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._started.append(process)
        address = _wait_until_ready(process, log)
        target = Target(address, (keys[0], keys[1]), process, log)
        target.new_log()
        return target

    @contextmanager
    def running(self, *flags: str, **more: Any) -> Iterator[Target]:
        """A service for one attack."""
        target = self.start(*flags, **more)
        try:
            yield target
        finally:
            assert target.process is not None
            _end(target.process)

    def close(self) -> None:
        """Ends whatever still runs."""
        for process in self._started:
            _end(process)
        for log in self._logs:
            log.close()


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("INKSTREAM_", "PYTHONPATH"))}
    return kept | {"PYTHONUNBUFFERED": "1"}


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> Address:
    ends = time.monotonic() + START_SECONDS
    address: Address | None = None
    while time.monotonic() < ends:
        if process.poll() is not None:
            raise ServiceFailed(f"exit code {process.returncode}: {log.read_text(errors='replace')[-400:]}")
        if address is None and (
            found := re.search(r"listening on http://([\d.]+):(\d+)", log.read_text(errors="replace"))
        ):
            address = Address(host=found[1], port=int(found[2]))
        if address is not None:
            with suppress(OSError, MalformedAnswer):
                if call(address, "GET", "/health/ready", timeout=5).status == 200:
                    return address
        time.sleep(0.05)
    _end(process)
    raise ServiceFailed(f"not ready in {START_SECONDS:.0f} s: {log.read_text(errors='replace')[-400:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL for the whole session that we started."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def remote_target(url: str, keys: list[str]) -> Target:
    """A service that the suite did not start."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"--url {url}: expected http://HOST:PORT")
    first, second = [*keys, *keys, None, None][:2]
    return Target(Address(host=parts.hostname, port=parts.port or 80), (first, second))


def children_of(pid: int) -> list[int]:
    """Direct child processes, from /proc."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def engine_of(pid: int) -> int | None:
    """The child that computes: the one whose command line names the engine."""
    for child in children_of(pid):
        with suppress(OSError):
            if b"engine" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    return None


def resident_bytes(pid: int) -> int:
    """Resident memory of the process; 0 if it has ended."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024
    return 0


def descriptors(pid: int) -> int:
    """Open file descriptors of the process."""
    with suppress(OSError):
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return 0


def leaks_in(log: str, secrets: Iterable[str]) -> list[str]:
    """Log lines that show internals or a secret."""
    secrets = [secret for secret in secrets if secret]
    return [line for line in log.splitlines() if INTERNALS.search(line) or any(secret in line for secret in secrets)]


def error_object(answer: Answer) -> dict[str, Any] | None:
    """The error of an answer if it has the documented shape."""
    body = answer.json()
    error = body.get("error") if isinstance(body, dict) else None
    wanted = {"message", "type", "param", "code", "request_id"}
    if not isinstance(error, dict) or not wanted <= set(error) or not isinstance(error["message"], str):
        return None
    return error


def as_json(value: object) -> str:
    """A body as one line, for a repro."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))
