"""Benefit of the prefix cache, and cost of a long prompt for concurrent streams: `python -m benchmarks.prefix`.

The real service with a model of 1,024 tokens (shape C of benchmarks/peers with random weights; others by --weights):

- the first token of a prompt that is new, and of one that begins with the same 900 tokens, in turn
- the gaps between the tokens of 8 streams alone, and while prompts of 1,000 tokens come in one after the other, in turn

Figures are a client's, medians over pairs and windows. The last line of stdout is one JSON object. Exit status: 0; 1
where the service does not start or a request fails.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.http_body import ProtocolError
from benchmarks.http_client import Connection, explain
from benchmarks.peers.shapes import find_model
from benchmarks.prefix_load import Pair, PrefixPlan, RequestFailed, Window, drive
from benchmarks.result import this_machine
from benchmarks.running import NotStarted, running
from model.command_line import OneLineParser


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The prefix cache: milliseconds, medians over pairs."""

    pairs: int
    cold_ms: float
    cold_tokens_per_second: float
    """Of the prompt, until its first token."""
    shared_ms: float
    sooner: float
    """The median of the pairs' ratios."""
    cached_tokens: int
    """The fewest that a second prompt found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Gaps between tokens, and arriving prompts: milliseconds, medians over windows."""

    windows: int
    alone_p50_ms: float
    alone_p99_ms: float
    beside_p50_ms: float
    beside_p99_ms: float
    p99_ratio: float
    """The median of the ratios of neighbouring windows."""
    beside_most_ms: float
    alone_tokens_per_second: float
    beside_tokens_per_second: float
    """Of the streams, the prompts not counted."""
    arrivals: int
    arrival_first_token_ms: float
    arrival_tokens_per_second: float
    """Of an arriving prompt, until its first token."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: see above."""
    parser = _parser()
    flags = parser.parse_args(argv)
    try:
        plan = PrefixPlan(**{name: getattr(flags, name) for name in PrefixPlan.__dataclass_fields__})
    except ValueError as error:
        parser.error(str(error))
    extra = ["--kernels", flags.kernels]
    if flags.prompt_tokens_beside:
        extra += ["--prompt-tokens-beside", str(flags.prompt_tokens_beside)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            weights = flags.weights or find_model("C", weights=Path("weights"), folder=Path(folder)).directory
            server, sharing, disturbance = _measure(["--weights", str(weights.resolve()), *extra], plan)
    except (NotStarted, RequestFailed, OSError, ProtocolError) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return 1
    _show(plan, sharing, disturbance)
    settings = {
        **msgspec.to_builtins(plan),
        "kernels": flags.kernels,
        "prompt_tokens_beside": flags.prompt_tokens_beside,
    }
    found: dict[str, Any] = {"machine": this_machine(), "server": server, "settings": settings}
    found |= {"sharing": sharing, "disturbance": disturbance}
    print(msgspec.json.encode({"benchmark": "prefix", **found}).decode())
    return 0


def share(pairs: Sequence[Pair], prompt: int) -> Sharing:
    """One pair and more, out of prompts of so many tokens."""
    cold = statistics.median(pair.cold for pair in pairs)
    return Sharing(
        pairs=len(pairs),
        cold_ms=cold * 1000,
        cold_tokens_per_second=prompt / cold,
        shared_ms=statistics.median(pair.shared for pair in pairs) * 1000,
        sooner=statistics.median(pair.cold / pair.shared for pair in pairs),
        cached_tokens=min(pair.cached for pair in pairs),
    )


def disturb(alone: Sequence[Window], beside: Sequence[Window], prompt: int) -> Disturbance:
    """As many windows of one kind as of the other; the arriving prompts have so many tokens."""
    first = [seconds for window in beside for seconds in window.first_tokens]
    arrival = statistics.median(first)
    return Disturbance(
        windows=len(alone),
        alone_p50_ms=statistics.median(w.gap(50) for w in alone) * 1000,
        alone_p99_ms=statistics.median(w.gap(99) for w in alone) * 1000,
        beside_p50_ms=statistics.median(w.gap(50) for w in beside) * 1000,
        beside_p99_ms=statistics.median(w.gap(99) for w in beside) * 1000,
        p99_ratio=statistics.median(b.gap(99) / max(a.gap(99), 1e-6) for a, b in zip(alone, beside, strict=True)),
        beside_most_ms=statistics.median(w.gap(100) for w in beside) * 1000,
        alone_tokens_per_second=statistics.median(w.tokens_per_second for w in alone),
        beside_tokens_per_second=statistics.median(w.tokens_per_second for w in beside),
        arrivals=len(first),
        arrival_first_token_ms=arrival * 1000,
        arrival_tokens_per_second=prompt / arrival,
    )


def _measure(flags: Sequence[str], plan: PrefixPlan) -> tuple[Any, Sharing, Disturbance]:
    with running(flags) as service:

        async def work() -> tuple[Any, list[Pair], list[Window], list[Window]]:
            connection = Connection(service.address)
            try:
                await service.wait(connection, "/health/ready")
                response = await connection.request("GET", "/v1/models")
                (model,) = msgspec.json.decode(await response.read_all())["data"]
            finally:
                connection.close()
            return model, *await drive(service.address, plan, model["n_vocab"])

        model, pairs, alone, beside = asyncio.run(work())
    return model, share(pairs, plan.shared + plan.tail), disturb(alone, beside, plan.prompt)


def _show(plan: PrefixPlan, sharing: Sharing, found: Disturbance) -> None:
    print(f"{plan.shared} tokens shared, {plan.tail} of their own; medians of {sharing.pairs} pairs")
    print(f"  first token, new prompt     {sharing.cold_ms:8.1f} ms  ({sharing.cold_tokens_per_second:.0f} tokens/s)")
    print(f"  first token, shared prompt  {sharing.shared_ms:8.1f} ms  ({sharing.cached_tokens} tokens cached)")
    print(f"  sooner                      {sharing.sooner:8.1f} x")
    print(f"{plan.streams} streams, gaps between tokens; medians of {found.windows} windows each")
    print("            p50 ms  p99 ms  most ms  tokens/s")
    print(f"  alone   {found.alone_p50_ms:8.2f}{found.alone_p99_ms:8.2f}{'-':>9}{found.alone_tokens_per_second:10.0f}")
    print(
        f"  beside  {found.beside_p50_ms:8.2f}{found.beside_p99_ms:8.2f}{found.beside_most_ms:9.2f}"
        f"{found.beside_tokens_per_second:10.0f}"
    )
    print(f"  p99, beside through alone   {found.p99_ratio:.2f} x")
    print(
        f"  first token of {found.arrivals} arriving prompts of {plan.prompt}: {found.arrival_first_token_ms:.1f} ms "
        f"({found.arrival_tokens_per_second:.0f} tokens/s)"
    )


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m benchmarks.prefix", description=__doc__.partition("\n")[0])
    add, default = parser.add_argument, PrefixPlan()
    add("--weights", type=Path, help="a weights directory (shape C of benchmarks/peers, random)")
    add("--kernels", default="auto", help="what computes: auto, native or torch (%(default)s)")
    add("--prompt-tokens-beside", type=int, default=0, help="as of inkstream serve; 256: no limit (its default)")
    add("--rounds", type=int, default=default.rounds, help="pairs, and windows of each kind (%(default)s)")
    add("--shared", type=int, default=default.shared, help="tokens that two prompts share (%(default)s)")
    add("--tail", type=int, default=default.tail, help="tokens of its own behind them (%(default)s)")
    add("--streams", type=int, default=default.streams, help="streams that are disturbed (%(default)s)")
    add("--tokens", type=int, default=default.tokens, help="tokens of each stream in a window (%(default)s)")
    add("--prompt", type=int, default=default.prompt, help="tokens of an arriving prompt (%(default)s)")
    add("--every-ms", type=float, default=default.every_ms, help="from one arrival to the next (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
