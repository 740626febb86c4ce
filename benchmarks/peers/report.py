"""Renders the results as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.peers.engines import EngineResult
from benchmarks.peers.numbers import Limits, ratio, summarise
from benchmarks.peers.plan import OURS
from benchmarks.peers.servers import Sample, ServerResult

_SIDE = 21
_CELL = 33


def engine_table(result: EngineResult) -> str:
    """Tokens a second of every side; in brackets the spread, then ours through theirs, then the share of the limit."""
    titles = list(result.speeds)
    size = f"{result.n_params / 1e6:.1f} M numbers in matrices"
    lines = [
        f"\n== {result.model}, {result.precision}: engines alone ({size}); tokens/s [spread], ours/theirs, % of limit",
        f"{'':{_SIDE}}" + "".join(f"{title:>{_CELL}}" for title in titles),
    ]
    for side in sides_of(result.facts, result.missing):
        cells = [_cell(result.speeds[title], side, result.fastest[title]) for title in titles]
        if any(cells):
            lines.append(f"{side:{_SIDE}}" + "".join(f"{cell or '-':>{_CELL}}" for cell in cells))
        if side in result.missing:
            lines.append(f"{side:{_SIDE}}  not there: {result.missing[side]}")
    lines.append(f"{'limit of the machine':{_SIDE}}" + "".join(f"{result.fastest[t]:>{_CELL},.0f}" for t in titles))
    for title in titles:
        if same := result.same_tokens[title]:
            told = ", ".join(f"{side} {count}" for side, count in same.items())
            lines.append(f"greedy tokens equal to ours from the start, {title}: {told}")
    return "\n".join([*lines, limits_line(result.limits)])


def server_table(result: ServerResult) -> str:
    """A row for each number of streams and each side."""
    lines = [
        f"\n== {result.model}, {result.precision}: under load, temperature 0.8; medians of the rounds",
        f"{'streams':>7}  {'':{_SIDE}}{'tokens/s [spread], ours/theirs':>{_CELL}}"
        f"{'first token p50/p99 ms':>25}{'between tokens p50/p99 ms':>28}",
    ]
    for streams, by_side in result.samples.items():
        for side, samples in by_side.items():
            cell = _cell({name: _speeds(s) for name, s in by_side.items()}, side, None)
            first = _pair([s.first_p50 for s in samples.values()], [s.first_p99 for s in samples.values()])
            gap = _pair([s.gap_p50 for s in samples.values()], [s.gap_p99 for s in samples.values()])
            lines.append(f"{streams:7}  {side:{_SIDE}}{cell:>{_CELL}}{first:>25}{gap:>28}")
    lines += [f"{'':7}  {side:{_SIDE}}  not there: {reason}" for side, reason in result.missing.items()]
    return "\n".join(lines)


def sides_of(facts: Mapping[str, object], missing: Mapping[str, str]) -> list[str]:
    """All that were asked for: ours, those that are there, those that are not."""
    return list(dict.fromkeys([OURS, *facts, *missing]))


def limits_line(limits: Limits) -> str:
    """What the machine gave between the measurements."""
    read = ", ".join(f"{size >> 20} MiB {speed / 1e9:.0f}" for size, speed in sorted(limits.read.items()))
    multiply = ", ".join(f"{precision} {speed / 1e9:,.0f}" for precision, speed in limits.multiply.items())
    return f"machine: reads {read} GB/s; multiplies {multiply} G operations/s"


def ratios(speeds: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Ours through theirs, for every other side."""
    ours = speeds.get(OURS, {})
    found = {side: ratio(ours, theirs) for side, theirs in speeds.items() if side != OURS}
    return {side: summary.median for side, summary in found.items() if summary}


def _cell(speeds: Mapping[str, Mapping[int, float]], side: str, fastest: float | None) -> str:
    if not speeds.get(side):
        return ""
    summary = summarise(list(speeds[side].values()))
    text = f"{summary.median:,.0f} [{summary.least:,.0f}-{summary.most:,.0f}]"
    quotient = ratios(speeds).get(side)
    text += " " * 7 if quotient is None else f" {quotient:5.2f}x"
    return text if fastest is None else f"{text} {100 * summary.median / fastest:3.0f}%"


def _speeds(samples: Mapping[int, Sample]) -> dict[int, float]:
    return {number: sample.tokens_per_second for number, sample in samples.items()}


def _pair(p50: Sequence[float], p99: Sequence[float]) -> str:
    return f"{summarise(p50).median:.2f} / {summarise(p99).median:.2f}"
