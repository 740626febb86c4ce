"""Compares OpenVINO GenAI, llama.cpp, CTranslate2, transformers: `python -m benchmarks.peers --models default,C`.

Installs peers from PyPI on first use, each into an environment of its own below .peers/. Every engine runs in a process
of its own with the same number of threads. Engines are measured in turn, A B C, B C A, ...; only one computes at a
time. Ratios are taken round by round. The last line of stdout is one JSON object. Exit status: 0; 1 if inkstream's own
engine or service is missing.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.common import print_result, this_machine
from benchmarks.peers import engines, servers
from benchmarks.peers.peer_pool import Workspace
from benchmarks.peers.plan import OURS, Options, figures, parse_options
from benchmarks.peers.report import engine_table, ratios, server_table
from benchmarks.peers.shapes import Model, find_model


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    # By default, SIGTERM ends the process without the cleanup that stops services and adapters.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    started = time.monotonic()
    sizes = options.sizes
    workspace = Workspace(
        folder=options.folder.resolve(),
        threads=options.threads,
        batch=max(sizes.batches),
        length=max(sizes.prefill, 2 * sizes.prompt + sizes.tokens) + 1,
    )
    machine = this_machine()
    print(f"{machine.cpu}, {machine.cores} cores, {machine.system}, Python {machine.python}; {options.threads} threads")
    models = [find_model(name, weights=options.weights, folder=workspace.models) for name in options.models]
    engine = [_engines(workspace, options, model, precision) for model in models for precision in options.precisions]
    server = [
        _servers(workspace, options, model, precision) for model in models for precision in options.server_precisions
    ]
    report = {
        "threads": options.threads,
        "sizes": sizes,
        "seconds": round(time.monotonic() - started),
        "engine": [block for block in engine if block],
        "server": [block for block in server if block],
    }
    print_result("peers", **msgspec.to_builtins(report, str_keys=True))
    return 1 if any(OURS in block["missing"] for block in [*engine, *server] if block) else 0


def _engines(workspace: Workspace, options: Options, model: Model, precision: str) -> dict[str, Any]:
    wanted = figures(options.what, options.sizes, model.config.context)
    if not wanted:
        return {}
    result = engines.compare(workspace, options.peers, model, precision, wanted, options.rounds)
    print(engine_table(result), flush=True)
    ratios_by_title = {title: ratios(speeds) for title, speeds in result.speeds.items()}
    return {**msgspec.to_builtins(result, str_keys=True), "ratios": ratios_by_title}


def _servers(workspace: Workspace, options: Options, model: Model, precision: str) -> dict[str, Any]:
    if "server" not in options.what:
        return {}
    result = servers.compare(workspace, options.peers, model, precision, options.sizes)
    print(server_table(result), flush=True)
    return dict(msgspec.to_builtins(result, str_keys=True))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
