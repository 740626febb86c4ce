"""loss.svg: axes, labels and lines, read back as XML."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from model.train.reporting.loss_plot import linear_ticks, log_ticks, loss_curve, tick_label
from model.train.reporting.metrics_log import Record
from model.train.reporting.report import Report
from tests.model.train.reporting.test_report import OUTLINE, progress

_SVG = "{http://www.w3.org/2000/svg}"


def records(n: int = 2000, *, held_out: bool = True, whole: bool = False) -> list[Record]:
    """A loss that falls from 3.3 to 1.4 with some noise, measured 20 times; three epochs."""
    found: list[Record] = []
    for i in range(1, n + 1):
        bits = 1.3 + 2.0 * math.exp(-6 * i / n) + 0.02 * math.sin(7 * i)
        found.append({"step": i, "tokens": 10_000 * i, "epoch": 3 * i / n, "bits_per_byte": bits})
        if held_out and i % (n // 20) == 0:
            found.append(found[-1] | {"held_out": bits - 0.05})
    return [*found, found[-1] | {"held_out_whole": 1.25}] if whole else found


def draw(found: list[Record]) -> ElementTree.Element:
    """The parsed picture."""
    picture = loss_curve(found, title="small, 4.74 M parameters", measured="held-out")
    assert picture is not None
    return ElementTree.fromstring(picture)


def line(svg: ElementTree.Element, css: str) -> list[tuple[float, float]]:
    """The points of a line in the picture."""
    found = svg.find(f"{_SVG}polyline[@class='{css}']")
    assert found is not None
    points = [point.split(",") for point in found.attrib["points"].split()]
    return [(float(x), float(y)) for x, y in points]


def words(svg: ElementTree.Element, css: str) -> list[str]:
    """The texts of a kind."""
    return [element.text or "" for element in svg.iter(f"{_SVG}text") if element.get("class") == css]


def test_both_lines_run_from_left_to_right_inside_the_axes_and_fall() -> None:
    svg = draw(records())
    for css, n_points in (("training", 400), ("noise", 400), ("held-out", 20)):
        points = line(svg, css)
        xs = [x for x, _ in points]
        assert n_points / 2 < len(points) <= n_points
        assert xs == sorted(set(xs))
        assert all(76 <= x <= 832 and 92 <= y <= 418 for x, y in points)
        assert points[0][1] < points[-1][1], "bits per byte fell, so the line goes down"


def test_a_point_stands_where_the_ticks_of_its_axis_say() -> None:
    svg = draw([{"step": 1, "tokens": 1_000_000, "epoch": 0.5, "bits_per_byte": bits} for bits in (1.0,)])
    assert line(svg, "training") == [(832.0, pytest.approx(255, abs=3))]
    svg = draw(records())
    xs = [float(e.attrib["x"]) for e in svg.iter(f"{_SVG}text") if e.get("class") == "x-tick"]
    assert words(svg, "x-tick") == ["0", "5 M", "10 M", "15 M", "20 M"]
    assert (xs[0], xs[-1]) == (76.0, 832.0)
    ys = [float(e.attrib["y"]) for e in svg.iter(f"{_SVG}text") if e.get("class") == "y-tick"]
    ticks = [float(text) for text in words(svg, "y-tick")]
    scale = [(a - b) / math.log(q / p) for a, b, p, q in zip(ys, ys[1:], ticks, ticks[1:], strict=False)]
    assert len(ticks) >= 4 and max(scale) == pytest.approx(min(scale), rel=0.02), "the axis is logarithmic"


def test_axes_title_and_legend_say_what_is_what() -> None:
    svg = draw(records(whole=True))
    assert words(svg, "x-label") == ["tokens seen"]
    assert words(svg, "y-label") == ["bits per byte (log scale): loss / ln 2 / bytes a token"]
    assert words(svg, "legend") == ["training, smoothed", "held-out", "held-out, all of it"]
    title = words(svg, "title")[0]
    assert re.fullmatch(r"Bits per byte: training 1\.3\d\d, held-out 1\.2500", title)
    assert svg.findtext(f"{_SVG}title") == title.lower().removeprefix("bits per byte: ") + " bits per byte"
    assert words(svg, "words") == ["small, 4.74 M parameters; 20.00 M tokens, 3.00 epochs"]
    assert len(svg.findall(f"{_SVG}line[@class='epoch']")) == 2


def test_light_and_dark_readers_both_have_their_colours() -> None:
    style = draw(records()).findtext(f"{_SVG}style") or ""
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for css in ("text", ".title", ".ground", ".grid", ".axis", ".training", ".held-out", ".dot"):
        assert css in light and css in dark


@pytest.mark.parametrize("n", [1, 2, 3, 50])
def test_short_runs_have_a_picture_too(n: int) -> None:
    assert len(line(draw(records(n, held_out=False)), "training")) == n


def test_there_is_no_picture_of_nothing() -> None:
    assert loss_curve([], title="", measured="held-out") is None
    zero = [{"step": 1, "tokens": 1, "epoch": 1.0, "bits_per_byte": 0.0, "held_out": None}]
    assert loss_curve(zero, title="", measured="held-out") is None


def test_a_title_is_text_and_no_markup() -> None:
    picture = loss_curve(records(5, held_out=False), title="<b> & co", measured="held-out")
    assert picture is not None
    assert words(ElementTree.fromstring(picture), "words")[0].startswith("<b> & co;")


def test_the_picture_is_there_when_a_run_ends_however_that_is(tmp_path: Path) -> None:
    def end_badly() -> None:
        with Report(tmp_path, OUTLINE, start_step=0, report_seconds=60) as report:
            report.step(progress(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        end_badly()
    assert ElementTree.fromstring((tmp_path / "loss.svg").read_text()).tag == f"{_SVG}svg"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "loss.svg"]


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        (linear_ticks(0, 23.4e6), "0, 5 M, 10 M, 15 M, 20 M"),
        (linear_ticks(0, 7680), "0, 1 k, 2 k, 3 k, 4 k, 5 k, 6 k, 7 k"),
        (linear_ticks(0, 2.1e9), "0, 0.5 G, 1.0 G, 1.5 G, 2.0 G"),
        (linear_ticks(0, 7), "0, 1, 2, 3, 4, 5, 6, 7"),
        (log_ticks(1.3, 3.3), "1.5, 2.0, 2.5, 3.0"),
        (log_ticks(1.36, 1.39), "1.360, 1.365, 1.370, 1.375, 1.380, 1.385, 1.390"),
        (log_ticks(0.02, 3), "0.02, 0.05, 0.10, 0.20, 0.50, 1.00, 2.00"),
        (log_ticks(0.001, 20), "0.001, 0.010, 0.100, 1.000, 10.000"),
    ],
)
def test_ticks_are_round(ticks: list[float], labels: str) -> None:
    assert ", ".join(tick_label(tick, ticks) for tick in ticks) == labels


@pytest.mark.parametrize("high", [10**exponent * factor for exponent in range(-2, 11) for factor in (1, 1.7, 3.3, 8)])
def test_any_range_has_a_few_ticks(high: float) -> None:
    assert 4 <= len(linear_ticks(0, high)) <= 8
    assert 3 <= len(log_ticks(high / 2, high)) <= 8
    assert 3 <= len(log_ticks(high / 1000, high)) <= 8
