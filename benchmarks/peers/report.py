"""The table of a comparison."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.common import Percentiles, range_of
from benchmarks.peers.comparison import Comparison
from benchmarks.peers.plan import OURS, ratio


def table(result: Comparison) -> str:
    """A row for each figure and engine: tokens per second with their spread, inkstream's ratio to it, latencies."""
    head = f"{'tokens/s [spread], ours/theirs':>33}{'first token p50/p99 ms':>25}{'between tokens p50/p99 ms':>28}"
    lines = [f"\n== {result.model}, {result.precision}; medians of the rounds", f"{'':34}{head}"]
    for title, by_engine in result.samples.items():
        speeds = result.speeds(title)
        for engine, rounds in by_engine.items():
            first = _pair([sample.first_token_ms for sample in rounds.values()])
            gap = _pair([sample.inter_token_ms for sample in rounds.values()])
            lines.append(f"{title:12} {engine:21}{_cell(speeds, engine):>33}{first:>25}{gap:>28}")
    lines += [f"{'':12} {engine:21}  not there: {reason}" for engine, reason in result.missing.items()]
    for title, same in result.same_tokens.items():
        counts = ", ".join(f"{engine} {count}" for engine, count in same.items())
        lines.append(f"greedy tokens equal to ours from the start, {title}: {counts}")
    return "\n".join(lines)


def ratios(speeds: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """inkstream's ratio to every other engine."""
    ours = speeds.get(OURS, {})
    ratios_by_engine = {engine: ratio(ours, theirs) for engine, theirs in speeds.items() if engine != OURS}
    return {engine: summary.median for engine, summary in ratios_by_engine.items() if summary}


def _cell(speeds: Mapping[str, Mapping[int, float]], engine: str) -> str:
    summary = range_of(list(speeds[engine].values()))
    quotient = ratios(speeds).get(engine)
    text = f"{summary.median:,.0f} [{summary.least:,.0f}-{summary.most:,.0f}]"
    return text + (" " * 7 if quotient is None else f" {quotient:5.2f}x")


def _pair(samples: Sequence[Percentiles | None]) -> str:
    """Medians over the rounds; empty for figures without latencies."""
    known = [sample for sample in samples if sample]
    return (
        str(Percentiles(**{p: statistics.median(getattr(s, p) or 0 for s in known) for p in ("p50", "p99")}))
        if known
        else ""
    )
