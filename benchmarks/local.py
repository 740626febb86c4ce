"""make bench: starts the service on a free port, runs benchmarks.load on it, stops it. Flags: --weights, and load's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from app.common import event_loop
from benchmarks import load
from benchmarks.http_client import Connection
from benchmarks.service_process import ServiceProcess, ServiceStartError, start_service


def main(argv: Sequence[str]) -> int:
    """Returns the exit status of benchmarks.load, or 2 if the service does not start."""
    flags = list(argv)
    weights = flags.pop(flags.index("--weights") + 1) if "--weights" in flags[:-1] else "weights"
    flags = [flag for flag in flags if flag != "--weights"]
    with start_service(["--weights", str(Path(weights).resolve())]) as service:
        try:
            event_loop.run(_wait_until_ready(service))
        except ServiceStartError:
            print(service.log.read_text(), end="", file=sys.stderr)
            return 2
        return load.main(["--url", f"http://{service.address.host}:{service.address.port}", *flags])


async def _wait_until_ready(service: ServiceProcess) -> None:
    connection = Connection(service.address)
    try:
        await service.wait_for(connection, "/health/ready")
    finally:
        connection.close()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
