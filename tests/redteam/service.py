"""The service under attack: started as a user would start it, or running elsewhere."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.redteam.http_client import Address, Response, call

REPOSITORY = Path(__file__).parents[2]
START_SECONDS = 90.0
INTERNALS = re.compile(
    r"Traceback \(most recent|panicked at|RUST_BACKTRACE|/rustc/|\.cargo/|site-packages/| at 0x[0-9a-f]{6,}"
)
"""What no log line may contain while the service runs."""


class ServiceFailed(Exception):
    """The service did not start, or it ended by itself."""


@dataclass(slots=True)
class Target:
    """An address, the keys of two tenants, and the process and log if the suite started the service."""

    address: Address
    keys: tuple[str | None, str | None]
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    _log_offset: int = 0

    @property
    def pid(self) -> int:
        """The pid of a service that the suite started."""
        assert self.process is not None
        return self.process.pid

    def call(self, method: str, path: str, *, tenant: int | None = 0, **more: Any) -> Response:
        """Sends a request with the key of this tenant; None sends no key."""
        return call(self.address, method, path, key=None if tenant is None else self.keys[tenant], **more)

    def is_alive(self) -> bool:
        """Whether the service responds and its process runs."""
        if self.process is not None and self.process.poll() is not None:
            return False
        with suppress(OSError, ValueError):
            return self.call("GET", "/health/live", tenant=None, timeout=15).status == 200
        return False

    def new_log(self) -> str:
        """Log lines since the last call."""
        if self.log is None:
            return ""
        text = self.log.read_bytes()[self._log_offset :]
        self._log_offset += len(text)
        return text.decode("utf-8", "replace")

    def settle(self) -> None:
        """Waits until requests are fast again, so that one attack does not affect the next one's measurements."""
        ends = time.monotonic() + 20
        quick = 0
        while quick < 2 and time.monotonic() < ends:
            quick = quick + 1 if self._is_quick(ends - time.monotonic()) else 0
            time.sleep(0.05)

    def _is_quick(self, seconds: float) -> bool:
        began = time.monotonic()
        regex = f"[a-z ]{{1,{time.monotonic_ns() % 900 + 2}}}"
        guided = {"prompt": "a", "max_tokens": 1, "stream": False, "regex": regex}
        with suppress(OSError, ValueError):
            for tenant in (0, 1):
                self.call("POST", "/tokenize", tenant=tenant, body={"prompt": "It was. " * 900}, timeout=seconds)
                self.call("POST", "/complete", tenant=tenant, body=guided, timeout=seconds)
            return time.monotonic() - began < 0.6
        return False


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts services below a temporary directory and ends all of them."""

    directory: Path
    weights: Path

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs a verb of inkstream that ends within a minute. Raises TimeoutExpired."""
        command = [sys.executable, "-m", "app", *map(str, arguments)]
        return subprocess.run(
            command, cwd=REPOSITORY, env=_environment(), capture_output=True, text=True, timeout=60, check=False
        )

    @contextmanager
    def running(
        self, *flags: str, weights: Path | None = None, quotas: tuple[tuple[str, ...], ...] = ((), ())
    ) -> Iterator[Target]:
        """A service that is ready, with a key for each of two tenants, each with its flags of `keys add`.

        Raises:
            ServiceFailed: it ended, or was not ready in time; the text is the end of its log.
        """
        number = len(list(self.directory.glob("service-*.log")))
        file, log = self.directory / f"keys-{number}.json", self.directory / f"service-{number}.log"
        first, second = (
            self.run("keys", "add", f"tenant-{i}", "--keys-file", file, *quota).stdout.strip()
            for i, quota in enumerate(quotas)
        )
        command = [sys.executable, "-m", "app", "serve", "--port", "0", "--keys-file", str(file), *flags]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--weights", str(weights or self.weights)], cwd=REPOSITORY, env=_environment(),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            target = Target(_wait_until_ready(process, log), (first, second), process, log)
            target.new_log()
            yield target
        finally:
            _end(process)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("INKSTREAM_", "PYTHONPATH"))}
    return kept | {"PYTHONUNBUFFERED": "1"}


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> Address:
    ends = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < ends:
        if found := re.search(r"listening on http://([\d.]+):(\d+)", log.read_text(errors="replace")):
            address = Address(host=found[1], port=int(found[2]))
            with suppress(OSError, ValueError):
                if call(address, "GET", "/health/ready", timeout=5).status == 200:
                    return address
        time.sleep(0.05)
    code = process.poll()
    reason = f"not ready in {START_SECONDS:.0f} s" if code is None else f"exit code {code}"
    raise ServiceFailed(f"{reason}: {log.read_text(errors='replace')[-400:]}")


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


def engine_of(pid: int) -> int | None:
    """The engine process: the child whose command line names the engine."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            with suppress(OSError):
                if b"engine" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
    return None


def resident_bytes(pid: int) -> int:
    """Resident memory of the process; 0 if it has ended."""
    with suppress(OSError):
        found = re.search(r"^VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
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
