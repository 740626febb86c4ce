"""make bench: starts the service on a free port, puts benchmarks.load on it, stops it. Flags: --weights, load's."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks import load

_START_SECONDS = 120


def main(argv: Sequence[str]) -> int:
    """Exit codes: those of benchmarks.load; 2 where the service does not start."""
    flags = list(argv)
    weights = flags.pop(flags.index("--weights") + 1) if "--weights" in flags[:-1] else "weights"
    flags = [flag for flag in flags if flag != "--weights"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "app", "serve", "--port", "0", "--weights", weights]
        with log.open("w") as file:
            service = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            url = wait_until_ready(service, log)
            if url is None:
                print(log.read_text(), end="", file=sys.stderr)
                return 2
            return load.main(["--url", url, *flags])
        finally:
            service.terminate()
            service.wait()


def wait_until_ready(service: subprocess.Popen[bytes], log: Path) -> str | None:
    """The service's URL once it is ready; None where it ended, or took too long."""
    deadline = time.monotonic() + _START_SECONDS
    while service.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        found = re.search(r"listening on (http://[^\s\"]+)", log.read_text())
        if found and _is_ready(found.group(1)):
            return found.group(1)
    return None


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/health/ready", timeout=5) as response:  # nosec B310
            return bool(response.status == 200)
    except (URLError, OSError):
        return False


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
