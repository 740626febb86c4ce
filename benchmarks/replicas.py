"""Speedup by several engines on this machine: `python -m benchmarks.replicas [--replicas 2]`.

Runs two services with the same weights, one with one engine and one with several, on the same cores (or a GPU each).
The same load goes to both alternately, with new prompts in each round, so that other work on the machine affects both
alike. Figures are measured at the client; the speedup is the median of the ratios by round.

The last line of stdout is one JSON object. Exit status: 0; 1 if a service does not start or a request fails.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from benchmarks import load
from benchmarks.common import alternate, command_line, median_of, print_result
from benchmarks.load import LoadPlan
from benchmarks.service_process import ServiceProcess, ServiceStartError, running, serve_command


class LoadFailed(RuntimeError):
    """A request of the load failed; the message is that of the first one."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("replicas", __doc__)
    add = parser.add_argument
    add("--weights", default="weights", metavar="DIR", help="weights directory (%(default)s)")
    add("--replicas", type=int, default=2, metavar="N", help="engines of the second service (%(default)s)")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads of each service (all cores)")
    add("--streams", type=int, default=32, metavar="N", help="concurrent streams (%(default)s)")
    add("--max-tokens", type=int, default=128, metavar="N", help="tokens per request (%(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="load runs per service (%(default)s)")
    options = parser.parse_args(argv)
    common = serve_command("--weights", options.weights, *(["--threads", str(options.threads)] * bool(options.threads)))
    try:
        with running(common) as one, running([*common, "--replicas", str(options.replicas)]) as several:
            one.wait_for_route("/health/ready")
            several.wait_for_route("/health/ready")
            plan = LoadPlan(streams=(options.streams,), max_tokens=options.max_tokens)
            ways = {
                name: partial(_tokens_per_second, service, plan, count())
                for name, service in (("one", one), ("several", several))
            }
            rounds = alternate(ways, options.rounds)
    except (ServiceStartError, LoadFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    first, second = median_of(rounds, "one"), median_of(rounds, "several")
    ratio = round(median_of(rounds, "several", by="one"), 3)
    print(
        f"{options.streams} streams: {first:.0f} tokens/s with one engine, "
        f"{second:.0f} with {options.replicas}: {ratio:.2f} times"
    )
    print_result(
        "replicas",
        replicas=options.replicas,
        streams=options.streams,
        rounds=options.rounds,
        one_tokens_per_second=round(first, 1),
        several_tokens_per_second=round(second, 1),
        speed_up=ratio,
    )
    return 0


def _tokens_per_second(service: ServiceProcess, plan: LoadPlan, seeds: count[int]) -> float:
    """Output tokens per second. Raises LoadFailed."""
    result = asyncio.run(load.run(replace(plan, url=service.url, seed=next(seeds))))
    if result.failed:
        raise LoadFailed(str(result.levels[-1].first_error))
    return result.levels[-1].output_tokens_per_second


if __name__ == "__main__":
    sys.exit(main())
