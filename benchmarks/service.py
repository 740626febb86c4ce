"""Speed of the service, and what each token costs its processes in CPU time: `python -m benchmarks.service`.

For each API and number of streams: tokens per second, time to first token, gaps between reads, and CPU microseconds per
token of the API process, of the engine and of this process. `alone` are the tokens per second without the cost of this
process, which is measured on a control that computes nothing and sends tokens at the same pace (control_service.py); it
is valid only if nothing else uses the cores. Linux only: reads CPU times from /proc. The last line of stdout
is one JSON object. Exit status: 0; 1 if the service does not start or does not answer.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from app.common import event_loop
from benchmarks.client import Exchange, keep_busy
from benchmarks.common import available_cores, command_line, percentile, print_result
from benchmarks.completions import Failed, measure
from benchmarks.load import LoadPlan
from benchmarks.service_process import ServiceProcess, ServiceStartError, child_pids, running, serve_command

_PROMPT_WORDS = 48


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = command_line("service", __doc__)
    add = parser.add_argument
    add("--weights", default="weights", help="weights directory (%(default)s)")
    add("--streams", default="1,8,32", help="numbers of streams (%(default)s)")
    add("--apis", default="complete,openai", help="complete, openai, or both")
    add("--tokens", type=int, default=128, help="tokens per request (%(default)s)")
    add("--seconds", type=float, default=3.0, help="seconds per measurement (%(default)s)")
    flags = parser.parse_args(argv)
    costs = []
    print(
        "api       streams  tokens/s   alone  us/token: API  engine  load (control)"
        "  first p50 / p99 ms  gap p50 / p99 ms"
    )
    try:
        with running(serve_command("--weights", Path(flags.weights).resolve())) as service:
            service.wait_for_route("/health/ready")
            for api, streams in itertools.product(flags.apis.split(","), map(int, flags.streams.split(","))):
                sizes = {"max_tokens": flags.tokens, "prompt_words": _PROMPT_WORDS}
                plan = LoadPlan(url=service.url, api=api, streams=(streams,), **sizes)
                cost = event_loop.run(_measure(service, plan, flags.seconds))
                cost |= _without_load(cost, _control(plan, cost["tokens_per_second"], flags.seconds))
                costs.append({"api": api, "streams": streams, **cost})
                print(
                    f"{api:8}  {streams:7}  {cost['tokens_per_second']:8.0f}  {cost['alone']:6.0f}  "
                    f"{cost['api_us']:13.1f}  {cost['engine_us']:6.1f}  {cost['load_us']:4.1f} "
                    f"({cost['control_us']:7.1f})  "
                    f"{cost['first_token_ms']:8.2f} / {cost['first_token_p99_ms']:<7.2f}  "
                    f"{cost['gap_p50_ms']:7.2f} / {cost['gap_p99_ms']:.2f}",
                    flush=True,
                )
    except (ServiceStartError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_result("service", tokens=flags.tokens, costs=costs)
    return 0


def _control(plan: LoadPlan, tokens_per_second: float, seconds: float) -> float:
    """CPU microseconds per token of this process under the same plan, with a control that keeps the same pace."""
    step_ms = 1e3 * plan.streams[0] / tokens_per_second
    with running([sys.executable, "-m", "benchmarks.control_service", f"{step_ms:.3f}"]) as control:
        control.wait_for_route("/")
        plan = replace(plan, url=control.url, api="complete")
        return event_loop.run(_measure(control, plan, seconds))["load_us"]


def _without_load(cost: Mapping[str, float], control_us: float) -> dict[str, float]:
    """The control's figure, and the tokens per second if every core had the load generator's time as well."""
    core_seconds = available_cores() / cost["tokens_per_second"]
    return {"control_us": control_us, "alone": available_cores() / (core_seconds - control_us / 1e6)}


async def _measure(service: ServiceProcess, plan: LoadPlan, seconds: float) -> dict[str, float]:
    """Raises OSError if a stream fails or nothing finished."""
    exchanges: list[Exchange] = []

    def new_exchanges() -> Iterator[Exchange]:
        for index in itertools.count():
            exchanges.append(plan.request(index).exchange(plan.address))
            yield exchanges[-1]

    pid, address = service.process.pid, service.address
    clients = asyncio.create_task(keep_busy(address, plan.streams[0], new_exchanges(), lambda _: None))
    await asyncio.sleep(min(1.0, seconds / 3))  # warm-up: opens every stream, takes every path
    clocks = (partial(_cpu_seconds, [pid]), partial(_cpu_seconds, child_pids(pid)), time.process_time, time.monotonic)
    before = [clock() for clock in clocks]
    await asyncio.sleep(seconds)
    after = [clock() for clock in clocks]
    clients.cancel()
    await asyncio.gather(clients, return_exceptions=True)
    begin, end = before[-1], after[-1]
    failures = [outcome.message for e in exchanges if e.ended and isinstance(outcome := measure(e), Failed)]
    n_tokens = sum(begin <= at < end for e in exchanges for at in e.arrivals)
    first = [e.arrivals[0] - e.sent for e in exchanges if e.arrivals and begin <= e.arrivals[0] < end]
    gaps = [b - a for e in exchanges for a, b in pairwise(e.arrivals) if begin <= b < end and a < b]
    if failures or not first or not gaps:
        raise OSError(failures[0] if failures else "no request finished in time; raise --seconds")
    api, engine, load, wall = (late - early for early, late in zip(before, after, strict=True))
    return {
        "tokens_per_second": n_tokens / wall,
        "api_us": api / n_tokens * 1e6,
        "engine_us": engine / n_tokens * 1e6,
        "load_us": load / n_tokens * 1e6,
        "first_token_ms": percentile(first, 50) * 1e3,
        "first_token_p99_ms": percentile(first, 99) * 1e3,
        "gap_p50_ms": percentile(gaps, 50) * 1e3,
        "gap_p99_ms": percentile(gaps, 99) * 1e3,
    }


def _cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time of all threads that have not ended; schedstat counts nanoseconds, /proc/PID/stat only ticks."""
    nanoseconds = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # a helper process that has just ended
            tasks = Path(f"/proc/{pid}/task").iterdir()
            nanoseconds += sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)
    return nanoseconds / 1e9


if __name__ == "__main__":
    sys.exit(main())
