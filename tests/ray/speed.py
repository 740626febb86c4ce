"""Tokens/s and first token of two copies on Ray and of `inkstream serve --replicas 2`, in turns on this machine.

`.ray/bin/python -m tests.ray.guard -m tests.ray.speed [ROUNDS]`; a thread for each engine, the default weights. Both
services run all the time: the one that is not measured is idle.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.service_process import launch
from tests.ray.cluster import PROXY_URL, URL, TwoNodes, settings_of_the_test
from tests.support import ROOT

STREAMS = (16, 64)


def measure(url: str, streams: int) -> tuple[float, float]:
    """Tokens/s and the median milliseconds to the first token. Raises AssertionError where a request failed."""
    command = [sys.executable, "-m", "benchmarks.load", "--url", url, "--streams", str(streams), "--json-only"]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout
    (level,) = json.loads(output)["levels"]
    assert level["completed"] == level["requests"], level
    return level["output_tokens_per_second"], level["first_token_ms"]["p50"]


def compare(urls: dict[str, str], rounds: int) -> None:
    """Prints the medians of each, and their ratio to the first."""
    found: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(rounds):
        for streams in STREAMS:
            for name, url in urls.items():
                found[name, streams].append(measure(url, streams))
    for streams in STREAMS:
        first = found[next(iter(urls)), streams]
        for name in urls:
            pairs = list(zip(found[name, streams], first, strict=True))
            tokens, first_token = (statistics.median(values) for values in zip(*found[name, streams], strict=True))
            ratio = statistics.median(one[0] / other[0] for one, other in pairs)
            later = statistics.median(one[1] / other[1] for one, other in pairs)
            print(
                f"{streams:3} streams  {name:28} {tokens:7.0f} tokens/s ({ratio:.0%})"
                f"   first token {first_token:5.0f} ms ({later:.2f}x)",
                flush=True,
            )


def main(rounds: int) -> None:
    """Starts both, and compares them."""
    settings_of_the_test(str(ROOT / "weights"))
    os.environ.update(INKSTREAM_KERNELS="auto", INKSTREAM_MAX_RUNNING="64")
    nodes = TwoNodes()
    try:
        nodes.deploy()
        nodes.wait_for_copies(2)
        with TemporaryDirectory() as folder:
            environment = {**os.environ, "INKSTREAM_THREADS": "2"}
            command = [sys.executable, "-m", "app", "serve", "--replicas", "2", "--port", "0"]
            service = launch(command, Path(folder) / "log", environment=environment)
            try:
                service.wait_for_route("/health/ready")
                urls = {"--replicas 2": service.url, "Ray, the gateway's port": URL, "Ray, its proxy": PROXY_URL}
                compare(urls, rounds)
            finally:
                service.kill()
    finally:
        nodes.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 5)
