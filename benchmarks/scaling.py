"""How a decode step scales with threads: `python -m benchmarks.scaling [--shape default|C|B|1b]`.

Measures the rates of one thread by the time of each operation of a step, and what synchronization costs by a step of
one row on two threads. Compares the model of app/serving/replica_count.py with measured steps on one and on two
threads, which take turns, and prints its predictions for up to 64 threads. Only the first table holds measurements.

The kernels alone: native, bfloat16, random weights, the least time of all steps, because other work on the cores only
adds to it. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from app.common.cpu_topology import Core, Topology
from app.engine.cpu.toolchain.builder import find_or_build
from app.serving.replica_count import OperationCost, Rates, operations, step_seconds, tokens_per_second
from benchmarks.common import alternate, command_line, print_result
from benchmarks.engine import CONTEXT_TOKENS, DecodeSteps
from benchmarks.shapes import SHAPES
from model.config import ModelConfig
from model.presets import preset

ROWS, THREADS = (1, 8, 32), (1, 2, 4, 8, 16, 32, 64)
_MEASURED, _ENGINES = (1, 2), (1, 2, 4, 8)
_ITEM_BYTES = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = command_line("scaling", __doc__)
    parser.add_argument(
        "--shape", choices=("default", *SHAPES), default="default", help="decoder's shape (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=40, help="steps of each number of rows and threads (%(default)s)")
    options = parser.parse_args(argv)
    config = preset("small") if options.shape == "default" else SHAPES[options.shape]
    library = find_or_build()
    decoders = {threads: DecodeSteps(config, library, threads=threads, rows=max(ROWS)) for threads in _MEASURED}
    ways = {f"{threads} {rows}": _step_of(decoder, rows) for threads, decoder in decoders.items() for rows in ROWS}
    steps = alternate(ways, options.rounds)
    least = {way: min(sum(step[way]) for step in steps) for way in ways}
    rates = fit({rows: min((step[f"1 {rows}"] for step in steps), key=sum) for rows in ROWS}, config)
    rates = replace(rates, synchronization=fit_synchronization(least[f"2 {min(ROWS)}"], min(ROWS), rates, config))
    print(f"{'kernels, us':12}{'measured':>10}{'model':>10}{'error':>8}")
    errors = {}
    for way, measured in least.items():
        threads, rows = map(int, way.split())
        modeled = step_seconds(config, rows, threads, replace(rates, host=0, host_row=0), context=CONTEXT_TOKENS)
        errors[way] = modeled / measured - 1
        print(f"{threads} x {rows:2} rows{measured * 1e6:10.0f}{modeled * 1e6:10.0f}{errors[way]:+8.0%}")
    print(f"\nby the model, {max(ROWS)} rows an engine, one NUMA node, tokens/s of the engines alone")
    print(
        f"(one API process delivers {1 / rates.api:,.0f}):\n{'threads':>8}"
        + "".join(f"{n:>7} engines" for n in _ENGINES)
    )
    alone, table = replace(rates, api=1e-9), {}
    for threads in THREADS:
        topology = Topology(tuple(Core((cpu,)) for cpu in range(threads)))
        table[threads] = {
            n: tokens_per_second(config, topology, n, max(ROWS), alone, threads=threads)
            for n in _ENGINES
            if n <= threads
        }
        print(f"{threads:8}" + "".join(f"{speed:15,.0f}" for speed in table[threads].values()))
    print_result("scaling", shape=options.shape, rates=asdict(rates), least_us=least, errors=errors, modeled=table)
    return 0


def _step_of(decoder: DecodeSteps, rows: int) -> Callable[[], array[float]]:
    """Seconds of each operation of a step, and of its head."""

    def take() -> array[float]:
        whole, head, seconds = decoder.step(rows)
        return array("d", [whole - head - sum(seconds), *seconds, head])

    return take


def fit(least: Mapping[int, Sequence[float]], config: ModelConfig) -> Rates:
    """Rates of one thread from the seconds of each operation at some numbers of rows."""
    few, many = min(least), max(least)

    def rate(rows: int, amount: Callable[[OperationCost], int]) -> float:
        work = timed_operations(config, rows)
        pairs = [(amount(one), seconds) for one, seconds in zip(work, least[rows], strict=True) if amount(one)]
        return sum(done for done, _ in pairs) / sum(seconds for _, seconds in pairs)

    return Rates(
        weights=rate(few, lambda one: one.weight_bytes),
        products=rate(many, lambda one: one.products),
        cache=rate(many, lambda one: one.cache_bytes),
        numbers=rate(many, lambda one: one.numbers),
    )


def fit_synchronization(seconds: float, rows: int, rates: Rates, config: ModelConfig) -> float:
    """Seconds that an operation waits for threads, from the kernels' seconds of a step on two threads."""
    without = replace(rates, synchronization=0, host=0, host_row=0)
    shared = sum(one.tasks > 1 for one in operations(config, rows, _ITEM_BYTES, CONTEXT_TOKENS))
    return max(0.0, seconds - step_seconds(config, rows, 2, without, context=CONTEXT_TOKENS)) / shared


def timed_operations(config: ModelConfig, rows: int) -> list[OperationCost]:
    """In the order of what DecodeSteps times: embedding and other overhead, operations, head."""
    *body, outside, head, _draw = operations(config, rows, _ITEM_BYTES, CONTEXT_TOKENS)
    return [outside, *body, head]


if __name__ == "__main__":
    sys.exit(main())
