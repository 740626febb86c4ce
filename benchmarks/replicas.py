"""Speedup by several engines on this machine: `python -m benchmarks.replicas [--replicas 2]`.

Runs two services with the same weights, one with one engine and one with several, on the same cores (or a GPU each).
The same load goes to both alternately, with new prompts in each round, so that other work on the machine affects both
alike. Figures are measured at the client; the speedup is the median of the ratios by round.

The last line of stdout is one JSON object. Exit status: 0; 1 if a service does not start or a request fails.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from benchmarks import load
from benchmarks.http_client import Connection
from benchmarks.load_plan import LoadPlan
from benchmarks.machine_info import Machine, this_machine
from benchmarks.service_process import ServiceProcess, ServiceStartError, start_service
from model.command_line import OneLineParser


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Medians over rounds."""

    replicas: int
    streams: int
    rounds: int
    one_tokens_per_second: float
    several_tokens_per_second: float
    speed_up: float
    machine: Machine


class RequestFailed(RuntimeError):
    """A request of the load failed; the message is that of the first one."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    common = ["--weights", options.weights, *(["--threads", str(options.threads)] if options.threads else [])]
    try:
        with ExitStack() as services:
            one = services.enter_context(start_service(common))
            several = services.enter_context(start_service([*common, "--replicas", str(options.replicas)]))
            scaling = asyncio.run(_measure(one, several, options))
    except (ServiceStartError, RequestFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{scaling.streams} streams: {scaling.one_tokens_per_second:.0f} tokens/s with one engine, "
        f"{scaling.several_tokens_per_second:.0f} with {scaling.replicas}: {scaling.speed_up:.2f} times"
    )
    print(msgspec.json.encode({"benchmark": "replicas", **msgspec.to_builtins(scaling)}).decode(), flush=True)
    return 0


async def _measure(one: ServiceProcess, several: ServiceProcess, options: argparse.Namespace) -> Scaling:
    for service in (one, several):
        connection = Connection(service.address)
        try:
            await service.wait_for(connection, "/health/ready")
        finally:
            connection.close()
    pairs = []
    for seed in range(options.rounds):
        # The second service finds a warm machine, so the order alternates.
        order = (one, several) if seed % 2 == 0 else (several, one)
        speeds = {service.address: await _tokens_per_second(service, seed, options) for service in order}
        pairs.append((speeds[one.address], speeds[several.address]))
    return Scaling(
        replicas=options.replicas,
        streams=options.streams,
        rounds=options.rounds,
        one_tokens_per_second=round(statistics.median(first for first, _ in pairs), 1),
        several_tokens_per_second=round(statistics.median(second for _, second in pairs), 1),
        speed_up=round(statistics.median(second / first for first, second in pairs), 3),
        machine=this_machine(),
    )


async def _tokens_per_second(service: ServiceProcess, seed: int, options: argparse.Namespace) -> float:
    """Output tokens per second. Raises RequestFailed."""
    url = f"http://{service.address.host}:{service.address.port}"
    plan = LoadPlan(url=url, streams=(options.streams,), max_tokens=options.max_tokens, seed=seed)
    result = await load.run(plan)
    if result.failed:
        raise RequestFailed(str(result.levels[-1].first_error))
    return result.levels[-1].output_tokens_per_second


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m benchmarks.replicas", description="Speedup by several engines.")
    add = parser.add_argument
    add("--weights", default="weights", metavar="DIR", help="weights directory (%(default)s)")
    add("--replicas", type=int, default=2, metavar="N", help="engines of the second service (%(default)s)")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads of each service (all cores)")
    add("--streams", type=int, default=32, metavar="N", help="concurrent streams (%(default)s)")
    add("--max-tokens", type=int, default=128, metavar="N", help="tokens per request (%(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="load runs per service (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
