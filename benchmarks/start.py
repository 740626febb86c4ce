"""Startup time of the service: `python -m benchmarks.start [--starts N] [--kernels native,torch]`.

Seconds from the start of the process until /health/live answers, until /health/ready answers with 200, and until the
first token of the first request arrives. Kinds of kernels alternate; medians and ranges. Native kernels should be in
the cache (`inkstream compile`); otherwise an uncounted first start builds them. The last line of stdout is one JSON
object. Exit status: 0; 1 if the service does not start or does not answer.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.client import exchange_alone
from benchmarks.common import alternate, command_line, print_result, range_of
from benchmarks.completions import CompletionRequest, Failed, measure
from benchmarks.service_process import ServiceStartError, running, serve_command

_REQUEST = CompletionRequest(prompt="Once upon a time", max_tokens=4, temperature=0.8, seed=1)
_MOMENTS = ("live", "ready", "first_token")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = command_line("start", __doc__)
    add = parser.add_argument
    add("--weights", type=Path, default=Path("weights"), help="weights directory (%(default)s)")
    add("--kernels", default="native,torch", metavar="KIND,KIND", help="kinds of kernels (%(default)s)")
    add("--starts", type=int, default=9, metavar="N", help="counted starts of each kind (%(default)s)")
    flags = parser.parse_args(argv)
    kinds = flags.kernels.split(",")
    if flags.starts < 1:
        parser.error("--starts must be 1 or more")
    try:
        rounds = alternate({kind: partial(_measure, flags.weights.resolve(), kind) for kind in kinds}, flags.starts)
    except (ServiceStartError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{'kernels':8}{'live s (range)':>24}{'ready s (range)':>24}{'first token s (range)':>24}")
    summaries = []
    for kind in kinds:
        ranges = {moment: range_of([round_[kind][moment] for round_ in rounds]) for moment in _MOMENTS}
        cells = [f"{each.median:.2f} ({each.least:.2f}-{each.most:.2f})" for each in ranges.values()]
        print(f"{kind:8}" + "".join(f"{cell:>24}" for cell in cells))
        summaries.append({"kernels": kind, "starts": flags.starts, **ranges})
    print_result("start", kinds=summaries)
    return 0


def _measure(weights: Path, kernels: str) -> dict[str, float]:
    with running(serve_command("--weights", weights, "--kernels", kernels)) as service:
        live = service.wait_for_route("/health/live")
        ready = service.wait_for_route("/health/ready")
        outcome = measure(asyncio.run(exchange_alone(service.address, _REQUEST.exchange(service.address))))
        if isinstance(outcome, Failed) or outcome.first_token is None:
            raise OSError(outcome.message if isinstance(outcome, Failed) else "the first completion had no text")
        return {"live": live, "ready": ready, "first_token": ready + outcome.first_token}


if __name__ == "__main__":
    sys.exit(main())
