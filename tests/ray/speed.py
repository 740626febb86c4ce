"""Compares tokens/s and time to first token of two replicas on Ray and of `inkstream serve --replicas 2`.

`.ray/bin/python -m tests.ray.guard -m tests.ray.speed [ROUNDS]`; one thread for each engine, the default weights. Both
services run all the time, and the one that is not measured is idle. The ratios are medians over rounds, so other load
on the machine changes them little.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from benchmarks.service_process import launch
from tests.ray.cluster import URL, TwoNodes, apply_settings
from tests.support import ROOT

STREAMS = (16, 64)


def measure(url: str, streams: int) -> tuple[float, float]:
    """Tokens/s and the median milliseconds to the first token. Raises AssertionError if a request failed."""
    httpx.get(f"{url}/v1/models", timeout=120).raise_for_status()  # the load generator waits only 5 s for the models
    command = [sys.executable, "-m", "benchmarks.load", "--url", url, "--streams", str(streams), "--json-only"]
    output = subprocess.run([*command, "--seconds", "900"], cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    (level,) = json.loads(output)["levels"]
    assert level["completed"] == level["requests"], level
    return level["output_tokens_per_second"], level["first_token_ms"]["p50"]


def compare(replicas: str, on_ray: str, rounds: int) -> None:
    """Prints the medians and ratios."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for turn in range(rounds):
        for streams in STREAMS:
            for url in (replicas, on_ray) if turn % 2 else (on_ray, replicas):
                found.setdefault((url, streams), []).append(measure(url, streams))
            print(f"round {turn + 1}: {streams} streams, {found[on_ray, streams][-1]} on Ray", flush=True)
    for streams in STREAMS:
        ours, theirs = found[on_ray, streams], found[replicas, streams]
        tokens, first_token = (
            statistics.median(one[which] / other[which] for one, other in zip(ours, theirs, strict=True))
            for which in (0, 1)
        )
        for name, values in (("--replicas 2", theirs), ("Ray", ours)):
            median_tokens, median_first = (statistics.median(column) for column in zip(*values, strict=True))
            print(f"{streams:3} streams  {name:14}{median_tokens:7.0f} tokens/s  first token {median_first:5.0f} ms")
        print(f"{streams:3} streams  {'ratio':14}{tokens:7.0%}           first token {first_token:.2f}x", flush=True)


def main(rounds: int) -> None:
    """Starts both services and compares them."""
    apply_settings(str(ROOT / "weights"))
    os.environ.update(INKSTREAM_KERNELS="auto", INKSTREAM_MAX_RUNNING="64")
    nodes = TwoNodes()
    try:
        nodes.deploy()
        nodes.wait_for_replicas(2)
        with TemporaryDirectory() as folder:
            environment = {**os.environ, "INKSTREAM_THREADS": "2"}
            command = [sys.executable, "-m", "app", "serve", "--replicas", "2", "--port", "0"]
            service = launch(command, Path(folder) / "log", environment=environment)
            try:
                service.wait_for_route("/health/ready", most=300)
                compare(service.url, URL, rounds)
            finally:
                service.kill()
    finally:
        nodes.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 5)
