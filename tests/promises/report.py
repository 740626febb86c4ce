"""Generates RELIABILITY.md from the results that the tests of promises recorded.

results.json next to this file keeps the last figures; merge() adds the new figures that the tests wrote. Only a
full-size figure replaces a full-size figure, so a run of the suite does not discard full-size measurements.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from benchmarks.common import this_machine
from tests.support.promise_figures import RESULTS, Figure, number_of

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
KEPT = HERE / "results.json"
PAGE = ROOT / "RELIABILITY.md"
PROMISES = sorted(
    {f"R{n}" for n in range(1, 31)}
    | {f"S{n}" for n in range(1, 28) if n != 22}
    | {number_of(path) for path in HERE.glob("test_[rs][0-9][0-9]_*.py")},
    key=lambda number: (number[0], int(number[1:])),
)
"""There is no S22. Later ones are those that have a test."""

_HEAD = """# Reliability

What inkstream promises when things go wrong, and what was measured. `make promises` generates this page from the
figures that the tests in `tests/promises` record in `tests/promises/results.json`. R: reliability, S: security.

{summary}
Machine: {machines}.

- **target** is the goal; a value short of it is marked. **floor** is the value below which the test fails; "=" means
  the target.
- **n** is the number of trials. **size** "full" is the size that the promise asks for (`make promises`, or
  `make promises ONLY="r10 s08"`, on an idle machine: some tests take minutes, the soak half an hour); "ci" is the
  smaller size that `make test` runs, also on a busy machine.
- Tests of leaks, liveness and overload have a control: the same check must fail with a planted fault.
- All figures were measured on loopback, with clients, service and engine on the same cores. Some tests run the service
  and the engine loop around a fake model, the others a tiny random model or the default weights.

| # | promise | figure | value | n | target | floor | size | date |
|---|---|---|---|---|---|---|---|---|
"""


def files_of_promises(folder: Path = HERE) -> dict[str, list[Path]]:
    """Promise -> the files that test it."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("test_[rs][0-9][0-9]_*.py")):
        found.setdefault(number_of(path), []).append(path)
    return found


def sentence(path: Path) -> str:
    """The promise: the first sentence of the docstring of its test file, without its number."""
    paragraph = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0].split())
    return re.sub(r"^[RS]\d+: ", "", re.split(r"(?<=\.) (?=[A-Z])", paragraph)[0])


def read_kept() -> list[Figure]:
    """The figures in results.json."""
    return [Figure(**entry) for entry in json.loads(KEPT.read_text())]


def merge(kept: list[Figure], new: list[Figure]) -> list[Figure]:
    """Merge new figures into kept ones; CI sizes never replace full sizes.

    Figures that a rerun test no longer records are dropped.
    """
    ran = {(figure.test, figure.size) for figure in new}
    left = [old for old in kept if (old.test, old.size) not in ran and (old.test, "full") not in ran]
    full = {(figure.promise, figure.what) for figure in [*left, *new] if figure.size == "full"}
    fresh = [figure for figure in new if figure.size == "full" or (figure.promise, figure.what) not in full]
    return sorted([*left, *fresh], key=_order)


def read_new(folder: Path = RESULTS) -> list[Figure]:
    """The figures that the tests wrote, on this machine."""
    machine = this_machine()
    where = f"{machine.cores} cores of {machine.cpu}, Python {machine.python}"
    return [Figure(**json.loads(path.read_text()) | {"machine": where}) for path in sorted(folder.glob("*.json"))]


def render(kept: list[Figure], files: dict[str, list[Path]]) -> str:
    """Return the text of RELIABILITY.md."""
    machines = sorted({figure.machine for figure in kept}) or ["none yet"]
    head = _HEAD.format(summary=_summary(kept), machines="; ".join(machines))
    figures = {number: list(of) for number, of in groupby(sorted(kept, key=_order), lambda figure: figure.promise)}
    lines = [line for number in PROMISES for line in _rows(number, files.get(number, []), figures.get(number, []))]
    return head + "\n".join(lines) + "\n"


def _summary(figures: list[Figure]) -> str:
    measured = {figure.promise for figure in figures}
    short = [f for f in figures if not f.reaches(f.target)]
    low = [f for f in short if not f.reaches(f.floor)]
    full = sum(figure.size == "full" for figure in figures)
    return (
        f"{len(measured)} of {len(PROMISES)} promises have figures: {len(figures)} figures, {full} of full size; "
        f"{len(figures) - len(short)} reach their target, {len(short)} do not, {len(low)} of these miss their floor."
    )


def _rows(number: str, files: list[Path], figures: list[Figure]) -> list[str]:
    """One promise: one row per figure, or one row that gives the reason for none."""
    if not files:
        return [f"| {number} | has no test yet | | | | | | | |"]
    words = " ".join(_cell(sentence(path)) for path in files)
    links = ", ".join(f"[{path.stem}](tests/promises/{path.name})" for path in files)
    promise = f"{words} ({links})"
    if not figures:
        return [f"| {number} | {promise} | no figure was written down yet | | | | | | |"]
    rows = []
    for i, figure in enumerate(figures):
        first = f"{number} | {promise}" if i == 0 else f"{number} | "
        floor = "=" if figure.floor == figure.target else _bound(figure, figure.floor)
        rows.append(
            f"| {first} | {_cell(figure.what)} | {_value(figure)} | {figure.n} | {_bound(figure, figure.target)} | "
            f"{floor} | {figure.size} | {figure.date} |"
        )
    return rows


def _value(figure: Figure) -> str:
    shown = f"{figure.value:g} {figure.unit}".strip()
    if figure.reaches(figure.target):
        return shown
    return f"**{shown}** (misses its {'target' if figure.reaches(figure.floor) else 'floor'})"


def _bound(figure: Figure, bound: float) -> str:
    if figure.unit.startswith("of "):
        return "all" if bound == figure.n else f"{bound:g}"
    return f"{'<=' if figure.better == 'low' else '>='} {bound:g} {figure.unit}".strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _order(figure: Figure) -> tuple[int, str, str]:
    return PROMISES.index(figure.promise), figure.test, figure.what


def write(kept: list[Figure]) -> None:
    """Write results.json, one figure per line, and RELIABILITY.md."""
    lines = (json.dumps(asdict(figure)) for figure in kept)
    KEPT.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    PAGE.write_text(render(kept, files_of_promises()))
