"""Summary statistics of the rounds, and the result tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.common import Range, range_of
from benchmarks.peers.engines import EngineResult
from benchmarks.peers.plan import OURS
from benchmarks.peers.servers import Sample, ServerResult
from benchmarks.roofline import Limits

_NAME_WIDTH = 21
_CELL_WIDTH = 33


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Range | None:
    """`ours` divided by `theirs`, round by round, so that a slow moment affects both; None without a common round."""
    pairs = [ours[number] / theirs[number] for number in ours if theirs.get(number)]
    return range_of(pairs) if pairs else None


def engine_table(result: EngineResult) -> str:
    """Tokens per second of every engine with their spread, inkstream's ratio to it, and the share of the limit."""
    titles = list(result.speeds)
    size = f"{result.n_params / 1e6:.1f} M numbers in matrices"
    lines = [
        f"\n== {result.model}, {result.precision}: engines alone ({size}); tokens/s [spread], ours/theirs, % of limit",
        f"{'':{_NAME_WIDTH}}" + "".join(f"{title:>{_CELL_WIDTH}}" for title in titles),
    ]
    for engine in engines_of(result.facts, result.missing):
        cells = [_cell(result.speeds[title], engine, result.fastest[title]) for title in titles]
        if any(cells):
            lines.append(f"{engine:{_NAME_WIDTH}}" + "".join(f"{cell or '-':>{_CELL_WIDTH}}" for cell in cells))
        if engine in result.missing:
            lines.append(f"{engine:{_NAME_WIDTH}}  not there: {result.missing[engine]}")
    lines.append(
        f"{'limit of the machine':{_NAME_WIDTH}}" + "".join(f"{result.fastest[t]:>{_CELL_WIDTH},.0f}" for t in titles)
    )
    for title in titles:
        if same := result.same_tokens[title]:
            counts = ", ".join(f"{engine} {count}" for engine, count in same.items())
            lines.append(f"greedy tokens equal to ours from the start, {title}: {counts}")
    return "\n".join([*lines, limits_line(result.limits)])


def server_table(result: ServerResult) -> str:
    """A row for each number of streams and each server."""
    lines = [
        f"\n== {result.model}, {result.precision}: under load, temperature 0.8; medians of the rounds",
        f"{'streams':>7}  {'':{_NAME_WIDTH}}{'tokens/s [spread], ours/theirs':>{_CELL_WIDTH}}"
        f"{'first token p50/p99 ms':>25}{'between tokens p50/p99 ms':>28}",
    ]
    for streams, by_side in result.samples.items():
        for engine, samples in by_side.items():
            cell = _cell({name: _speeds(s) for name, s in by_side.items()}, engine, None)
            first = _pair([s.first_p50 for s in samples.values()], [s.first_p99 for s in samples.values()])
            gap = _pair([s.gap_p50 for s in samples.values()], [s.gap_p99 for s in samples.values()])
            lines.append(f"{streams:7}  {engine:{_NAME_WIDTH}}{cell:>{_CELL_WIDTH}}{first:>25}{gap:>28}")
    lines += [f"{'':7}  {engine:{_NAME_WIDTH}}  not there: {reason}" for engine, reason in result.missing.items()]
    return "\n".join(lines)


def engines_of(facts: Mapping[str, object], missing: Mapping[str, str]) -> list[str]:
    """All requested engines: inkstream, available ones, missing ones."""
    return list(dict.fromkeys([OURS, *facts, *missing]))


def limits_line(limits: Limits) -> str:
    """Peaks of the machine, measured between the engines."""
    read = ", ".join(f"{size >> 20} MiB {speed / 1e9:.0f}" for size, speed in sorted(limits.read.items()))
    multiply = ", ".join(f"{precision} {speed / 1e9:,.0f}" for precision, speed in limits.multiply.items())
    return f"machine: reads {read} GB/s; multiplies {multiply} G operations/s"


def ratios(speeds: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """inkstream's ratio to every other engine."""
    ours = speeds.get(OURS, {})
    ratios_by_engine = {engine: ratio(ours, theirs) for engine, theirs in speeds.items() if engine != OURS}
    return {engine: summary.median for engine, summary in ratios_by_engine.items() if summary}


def _cell(speeds: Mapping[str, Mapping[int, float]], engine: str, fastest: float | None) -> str:
    if not speeds.get(engine):
        return ""
    summary = range_of(list(speeds[engine].values()))
    text = f"{summary.median:,.0f} [{summary.least:,.0f}-{summary.most:,.0f}]"
    quotient = ratios(speeds).get(engine)
    text += " " * 7 if quotient is None else f" {quotient:5.2f}x"
    return text if fastest is None else f"{text} {100 * summary.median / fastest:3.0f}%"


def _speeds(samples: Mapping[int, Sample]) -> dict[int, float]:
    return {number: sample.tokens_per_second for number, sample in samples.items()}


def _pair(p50: Sequence[float], p99: Sequence[float]) -> str:
    return f"{statistics.median(p50):.2f} / {statistics.median(p99):.2f}"
