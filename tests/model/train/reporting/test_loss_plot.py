"""loss.svg: axes, labels and lines, read back as XML."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from model.train.reporting.loss_plot import loss_curve, round_ticks
from model.train.reporting.metrics_log import Record
from model.train.reporting.report import Report
from tests.model.train.reporting.test_report import OUTLINE, progress

_SVG = "{http://www.w3.org/2000/svg}"
_X, _Y = (76, 832), (92, 418)


def _records(n: int = 2000) -> list[Record]:
    """A loss that falls from 3.3 to 1.4 with some noise, measured 20 times and once more at the end."""
    found: list[Record] = []
    for i in range(1, n + 1):
        bits = 1.3 + 2.0 * math.exp(-6 * i / n) + 0.02 * math.sin(7 * i)
        held_out = {"held_out": bits - 0.05} if i % max(1, n // 20) == 0 else {}
        found.append({"step": i, "tokens": 10_000 * i, "epoch": 3 * i / n, "bits_per_byte": bits, **held_out})
    return [*found, found[-1] | {"held_out_whole": 1.25}]


def _draw(records: Sequence[Record]) -> ElementTree.Element:
    picture = loss_curve(records, title="<b> & co", measured="held-out")
    assert picture is not None
    return ElementTree.fromstring(picture)


def _line(svg: ElementTree.Element, css: str) -> list[tuple[float, float]]:
    found = svg.find(f"{_SVG}polyline[@class='{css}']")
    assert found is not None
    points = [point.split(",") for point in found.attrib["points"].split()]
    return [(float(x), float(y)) for x, y in points]


def _texts(svg: ElementTree.Element, css: str) -> list[ElementTree.Element]:
    return [element for element in svg.iter(f"{_SVG}text") if element.get("class") == css]


def test_lines_run_from_left_to_right_inside_the_axes_and_fall_where_the_ticks_say() -> None:
    svg = _draw(_records())
    for css, n_points in (("training", 2000), ("noise", 2000), ("held-out", 20)):
        points = _line(svg, css)
        assert len(points) == n_points and points == sorted(points)
        assert all(_X[0] <= x <= _X[1] and _Y[0] <= y <= _Y[1] for x, y in points)
        assert points[0][1] < points[-1][1], "bits per byte fell, so the line goes down"
    jumps = {css: sum(abs(b - a) for (_, a), (_, b) in pairwise(_line(svg, css))) for css in ("training", "noise")}
    assert jumps["training"] < 0.5 * jumps["noise"], "smoothed"
    across, up = _texts(svg, "x-tick"), _texts(svg, "y-tick")
    assert [text.text for text in across] == ["0 M", "5 M", "10 M", "15 M", "20 M"]
    assert (float(across[0].attrib["x"]), float(across[-1].attrib["x"])) == _X
    ys, ticks = [float(text.attrib["y"]) for text in up], [float(text.text or "") for text in up]
    scale = [(a - b) / math.log(q / p) for (a, p), (b, q) in pairwise(zip(ys, ticks, strict=True))]
    assert len(ticks) >= 4 and max(scale) == pytest.approx(min(scale), rel=0.02), "the axis is logarithmic"
    (title,), (words, _) = _texts(svg, "title"), _texts(svg, "words")
    assert title.text and title.text.startswith("Bits per byte: training 1.3") and "held-out 1.2500" in title.text
    assert words.text == "<b> & co; 20.00 M tokens, 3.00 epochs"


@pytest.mark.parametrize("n", [1, 2, 50])
def test_short_runs_have_a_picture_and_empty_ones_have_none(n: int) -> None:
    assert len(_line(_draw(_records(n)), "training")) == n
    zero = [{"step": 1, "tokens": 1, "epoch": 1.0, "bits_per_byte": 0.0, "held_out": None}]
    for nothing in ([], zero):
        assert loss_curve(nothing, title="", measured="held-out") is None


def test_the_picture_is_there_when_a_run_ends_however_that_is(tmp_path: Path) -> None:
    report = Report(tmp_path, OUTLINE, start_step=0, report_seconds=60)
    with contextlib.suppress(KeyboardInterrupt), report:
        report.step(progress(1))
        raise KeyboardInterrupt
    assert ElementTree.fromstring((tmp_path / "loss.svg").read_text()).tag == f"{_SVG}svg"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "loss.svg"]


@pytest.mark.parametrize(("low", "high"), [(0, 23.4e6), (0, 7680), (0, 2.1e9), (1.3, 3.3), (1.36, 1.39)])
def test_ticks_are_a_few_round_numbers(low: float, high: float) -> None:
    ticks = round_ticks(low, high)
    assert 4 <= len(ticks) <= 8 and low <= ticks[0] and ticks[-1] < high + 1e-9
    steps = {f"{b - a:.1e}" for a, b in pairwise(ticks)}
    assert len(steps) == 1 and steps.pop()[:3] in ("1.0", "2.0", "5.0")
