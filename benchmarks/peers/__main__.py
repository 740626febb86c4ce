"""Compares OpenVINO GenAI, llama.cpp, transformers, vLLM: `python -m benchmarks.peers --models default,C`.

Installs peers from PyPI on first use, each into an environment of its own below .peers/. Every engine runs in a process
of its own with the same number of threads. Engines are measured in turn, A B C, B C A, ...; only one computes at a
time. Ratios are taken round by round. The last line of stdout is one JSON object. Exit status: 0; 1 if inkstream's own
engine or service is missing.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.common import available_cores, command_line, print_result, this_machine
from benchmarks.peers.comparison import (
    Comparison,
    Figure,
    compare,
    engine_figures,
    engine_starts,
    server_starts,
    table,
)
from benchmarks.peers.peer_pool import Workspace
from benchmarks.peers.provision import GGUF_FORMATS, OUR_PRECISIONS, OURS
from benchmarks.service_process import ROOT
from benchmarks.shapes import FAMILY_SHAPES, SMOLLM2, find_model
from benchmarks.smollm2 import NotAvailable

PEERS = ("openvino", "llama.cpp", "transformers", "vllm")
"""Of every comparison, unless --peers says otherwise."""
_USUAL_PRECISIONS = ("bf16", "f32", "int8")
PRECISIONS = (*_USUAL_PRECISIONS, "int4")
PARTS = ("engine", "prefill", "server")
_MODELS = ("default", "A", "B", "C", "1b", *FAMILY_SHAPES, SMOLLM2)
_LENGTH = 513
"""The longest sequence of any measurement: a prefill and its token."""


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Exits with a usage line and status 2 if the flags are invalid."""
    parser = command_line("peers", __doc__)
    for flag, choices, default in (
        ("--models", _MODELS, ("default", "C")),
        ("--what", PARTS, PARTS),
        ("--peers", (*PEERS, *GGUF_FORMATS, *OUR_PRECISIONS), PEERS),
        ("--precisions", PRECISIONS, _USUAL_PRECISIONS),
        ("--server-precisions", PRECISIONS, ("bf16",)),
    ):
        text = f"out of {', '.join(choices)} ({','.join(default)})"
        parser.add_argument(flag, type=_some_of(choices), default=default, metavar="NAMES", help=text)
    add = parser.add_argument
    add("--rounds", type=_positive, default=5, help="rounds; each measures every engine once (%(default)s)")
    sizes = "batch sizes and numbers of streams, at most 32 (1,8,32)"
    add("--streams", type=_numbers, default=(1, 8, 32), metavar="N,N", help=sizes)
    add("--threads", type=_positive, default=available_cores(), help="threads of each engine; default all cores")
    add("--weights", type=Path, default=ROOT / "weights", help="weights directory of the model `default`")
    add("--folder", type=Path, default=ROOT / ".peers", help="folder of environments and models (.peers)")
    return parser.parse_args(argv)


def _some_of(choices: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        if unknown := [name for name in names if name not in choices]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(choices)}")
        return names

    return parse


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(_positive(part) for part in text.split(","))
    if max(numbers) > 32:
        raise argparse.ArgumentTypeError(f"{max(numbers)} is more than 32, the limit of the engines' configuration")
    return numbers


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    # By default, SIGTERM ends the process without the cleanup that stops services and adapters.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    started = time.monotonic()
    folder = options.folder.resolve()
    workspace = Workspace(folder=folder, threads=options.threads, batch=max(options.streams), length=_LENGTH)
    machine = this_machine()
    print(f"{machine.cpu}, {machine.cores} cores, {machine.system}, Python {machine.python}; {options.threads} threads")
    try:
        models = [find_model(name, weights=options.weights, folder=workspace.models) for name in options.models]
    except NotAvailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    results: dict[str, list[Comparison]] = {"engine": [], "server": []}
    for model in models:
        figures = engine_figures(options.what, options.streams, model.config.context)
        for precision in options.precisions if figures else ():
            starts = engine_starts(workspace, options.peers, model, precision)
            results["engine"].append(compare(model.name, precision, starts, figures, options.rounds))
            print(table(results["engine"][-1]), flush=True)
    loads = [Figure(what="load", rows=streams) for streams in options.streams]
    for model in models if "server" in options.what else ():
        for precision in options.server_precisions:
            starts = server_starts(workspace, options.peers, model, precision)
            results["server"].append(compare(model.name, precision, starts, loads, options.rounds))
            print(table(results["server"][-1]), flush=True)
    report = {kind: [_with_ratios(each) for each in comparisons] for kind, comparisons in results.items()}
    seconds = round(time.monotonic() - started)
    print_result("peers", threads=options.threads, rounds=options.rounds, seconds=seconds, **report)
    return 1 if any(OURS in each.missing for comparisons in results.values() for each in comparisons) else 0


def _with_ratios(result: Comparison) -> dict[str, object]:
    by_title = {title: result.ratios(title) for title in result.samples}
    return {**msgspec.to_builtins(result, str_keys=True), "ratios": by_title}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
