"""loss.svg: the training loss and the held-out bits per byte over the tokens seen, drawn from the log.

Both curves are in bits per byte, so that they are comparable across tokenizers. Colors follow the reader's light or
dark setting, on the plot's own background.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from model.train.reporting.console import format_count
from model.train.reporting.metrics_log import Record

Point = tuple[float, float]
"""(tokens, bits per byte)."""

_WIDTH, _HEIGHT = 860, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 832, 92, 418
_MAX_TICKS = 8
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #57606a; }
.title { font-size: 18px; font-weight: 600; fill: #1f2328; }
.ground { fill: #ffffff; } .grid { stroke: #eaedf0; }
polyline { fill: none; stroke-linejoin: round; stroke-width: 2.25; }
.training { stroke: #2a78d6; } .noise { stroke: #2a78d6; stroke-width: 1; opacity: .3; }
.held-out { stroke: #d9480f; } .dot { fill: #d9480f; }
@media (prefers-color-scheme: dark) {
text { fill: #9198a1; } .title { fill: #f0f6fc; } .ground { fill: #0d1117; } .grid { stroke: #21262d; }
}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Maps data to coordinates of the plot."""

    most_tokens: float
    low: float
    high: float

    def x(self, tokens: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * tokens / self.most_tokens

    def y(self, bits: float) -> float:
        share = math.log(min(max(bits, self.low), self.high) / self.low) / math.log(self.high / self.low)
        return _BOTTOM - (_BOTTOM - _TOP) * share

    def line(self, points: Sequence[Point], css: str) -> str:
        coordinates = " ".join(f"{self.x(tokens):.1f},{self.y(bits):.1f}" for tokens, bits in points)
        return f'<polyline class="{css}" points="{coordinates}"/>'

    def dots(self, points: Sequence[Point], radius: float) -> Iterator[str]:
        for tokens, bits in points:
            yield f'<circle class="dot" cx="{self.x(tokens):.1f}" cy="{self.y(bits):.1f}" r="{radius}"/>'


def loss_curve(records: Sequence[Record], *, title: str, measured: str) -> str | None:
    """The SVG; None if there is nothing to draw yet.

    title: short description of the model. measured: name of the evaluated text ("held-out" or "training").
    """
    noise = _points(records, "bits_per_byte")
    if not noise:
        return None
    training = _smoothed(noise)
    held_out, whole = _points(records, "held_out"), _points(records, "held_out_whole")[-1:]
    values = [bits for _, bits in (*training, *held_out, *whole)]
    newest = records[-1]
    frame = _Frame(most_tokens=max(newest["tokens"], 1), low=0.97 * min(values), high=1.03 * max(values))
    summary = f"training {training[-1][1]:.3f} (blue, smoothed)" + "".join(
        f", {measured} {bits:.4f} (orange)" for _, bits in (whole or held_out)[-1:]
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<style>{_STYLE}\n</style>",
        f'<rect class="ground" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>',
        _text(28, 38, f"Bits per byte: {summary}", css="title"),
        _text(28, 61, f"{title}; {format_count(newest['tokens'])} tokens, {newest['epoch']:.2f} epochs"),
        *_axes(frame),
        frame.line(noise, "noise"),
        frame.line(training, "training"),
        frame.line(held_out, "held-out"),
        *frame.dots(held_out, 3.5),
        *frame.dots(whole, 5.5),
        "</svg>\n",
    ]
    return "\n".join(parts)


def round_ticks(low: float, high: float) -> list[float]:
    """A few multiples of 1, 2 or 5 times a power of ten within [low, high]."""
    power = 10.0 ** math.floor(math.log10((high - low) / _MAX_TICKS))
    for step in (factor * power for factor in (1, 2, 5, 10, 20)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < _MAX_TICKS:
            break
    return [i * step for i in range(first, last + 1)]


def _points(records: Sequence[Record], key: str) -> list[Point]:
    """The positive values of `key`, at most one per step."""
    return list({r["tokens"]: (r["tokens"], r[key]) for r in records if (r.get(key) or 0.0) > 0.0}.values())


def _smoothed(points: list[Point]) -> list[Point]:
    """Moving average over equally many neighbors on both sides, fewer toward the ends."""
    widest = len(points) // 40
    smooth = []
    for i, (tokens, _) in enumerate(points):
        reach = min(widest, i // 3, len(points) - 1 - i)  # smooth less at the start, where the loss falls steeply
        window = points[i - reach : i + reach + 1]
        smooth.append((tokens, math.fsum(bits for _, bits in window) / len(window)))
    return smooth


def _axes(frame: _Frame) -> Iterator[str]:
    for bits in round_ticks(frame.low, frame.high):
        y = frame.y(bits)
        yield f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_RIGHT}" y2="{y:.1f}"/>'
        yield _text(_LEFT - 10, y + 4.5, f"{bits:.4g}", anchor="end", css="y-tick")
    for tokens in round_ticks(0, frame.most_tokens):
        yield _text(frame.x(tokens), _BOTTOM + 21, f"{tokens / 1e6:.4g} M", anchor="middle", css="x-tick")
    yield _text((_LEFT + _RIGHT) / 2, _HEIGHT - 16, "tokens seen; bits per byte (log scale)", anchor="middle")


def _text(x: float, y: float, label: str, *, anchor: str = "start", css: str = "words") -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(label)}</text>'
