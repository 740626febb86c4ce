"""make bench: starts the service on a free port, runs benchmarks.load on it, stops it. Flags: --weights, and load's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import load
from benchmarks.service_process import ServiceStartError, running, serve_command


def main(argv: Sequence[str]) -> int:
    """Returns the exit status of benchmarks.load, or 2 if the service does not start."""
    flags = list(argv)
    weights = flags.pop(flags.index("--weights") + 1) if "--weights" in flags[:-1] else "weights"
    flags = [flag for flag in flags if flag != "--weights"]
    with running(serve_command("--weights", Path(weights).resolve())) as service:
        try:
            service.wait_for_route("/health/ready")
        except ServiceStartError:
            print(service.log.read_text(), end="", file=sys.stderr)
            return 2
        return load.main(["--url", service.url, *flags])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
