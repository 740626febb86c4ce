"""RELIABILITY.md equals what its generator makes of the recorded figures, and every promise is tested."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.promises.report import (
    KEPT,
    PAGE,
    PROMISES,
    files_of_promises,
    merge,
    read_kept,
    read_new,
    render,
    sentence,
)
from tests.support import ROOT
from tests.support.load.concurrent_clients import compare_outputs, outputs, seeded, send_all
from tests.support.promise_figures import Figure, Promise
from tests.support.servers import Server
from tests.support.trials import locate

FIGURE = Figure(
    promise="R1", what="waiting at most", value=7, unit="requests", target=10, floor=12, better="low", n=500, size="ci",
    test="tests/promises/test_r01_x.py::test_x", date="2026-01-01",
)  # fmt: skip


def _figure(**changes: object) -> Figure:
    return replace(FIGURE, **changes)  # type: ignore[arg-type]


def test_page_equals_the_generated_one() -> None:
    assert PAGE.read_text() == render(read_kept(), files_of_promises()), "run make promises ARGS=--report"


def test_every_promise_has_a_test_that_states_it() -> None:
    files = files_of_promises()
    assert not files.keys() - PROMISES
    assert [p for p in PROMISES if p not in files] == []
    for path in [path for paths in files.values() for path in paths]:
        assert sentence(path).endswith("."), path
        assert "promise." in path.read_text(), f"{path} records no figure"


def test_recorded_figures_come_from_existing_tests() -> None:
    for kept in read_kept():
        name, _, test = kept.test.partition("::")
        assert f"def {test}(" in (ROOT / name).read_text(), f"{kept.test} is gone: make promises, or drop its figure"


def test_figure_that_misses_its_target_is_marked() -> None:
    rows = {
        value: render([_figure(value=value)], {"R1": [ROOT / "tests/repository/test_reliability_page.py"]})
        for value in (10, 11, 13)
    }
    assert "misses" not in rows[10] and "| 10 requests | 500 | <= 10 requests | <= 12 requests | ci |" in rows[10]
    assert "**11 requests** (misses its target)" in rows[11] and "1 do not, 0 of these" in rows[11]
    assert "**13 requests** (misses its floor)" in rows[13] and "1 do not, 1 of these" in rows[13]


def test_every_promise_has_a_row_even_without_a_figure() -> None:
    page = render([], {"S3": [ROOT / "tests/repository/test_reliability_page.py"]})
    assert all(f"\n| {number} | " in page for number in PROMISES)
    assert page.count("no figure was written down yet") == 1
    assert page.count("has no test yet") == len(PROMISES) - 1


def test_figure_is_kept_until_its_test_runs_again_at_its_size() -> None:
    full, ci, renamed = _figure(size="full", value=1), _figure(value=2), _figure(what="another")
    assert merge([full], [ci]) == merge([ci], [full]) == [full]
    assert merge([full], [_figure(size="full", value=3)]) == [_figure(size="full", value=3)]
    assert merge([ci], [renamed]) == [renamed]
    assert merge([ci], [_figure(test="tests/x.py::test_other", what="b")])[0] == ci


def test_figures_of_failing_tests_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.promise_figures.RESULTS", tmp_path)
    with pytest.raises(AssertionError, match="the floor is 12"):
        Promise("test_r01_a.py::test_a", full=False).at_most("waiting", 13, target=10, floor=12, n=3)
    (kept,) = read_new(tmp_path)
    assert (kept.value, kept.size, kept.test) == (13, "ci", "test_r01_a.py::test_a")


@pytest.mark.slow
def test_a_failed_promise_reports_the_first_difference(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of the trial, both results, the seed, the request id, and the last lines of that server's log."""
    monkeypatch.setattr("tests.support.promise_figures.RESULTS", tmp_path)
    specs = seeded({"prompt": "Once", "max_tokens": 8, "ignore_eos": True}, 6)
    answers = send_all(server, specs)
    expected = outputs(answers)
    promise = Promise("test_r01_a.py::test_a", full=False)
    promise.all_of("same outputs", compare_outputs(server, answers, expected))
    for planted in (3, 5):
        expected[planted]["texts"][0] += "!"
    assert server.has_logged(answers[3].name)
    with pytest.raises(AssertionError) as failed:
        promise.all_of("same outputs", compare_outputs(server, answers, expected))
    message = str(failed.value)
    assert "R1: same outputs is 4 of 6, the floor is 6" in message
    assert f"trial 3 (seed 3, request {answers[3].name}): ['texts'][0] from " in message
    assert re.search(r"expected '.*!', got '.*[^!]'; lengths (\d+), \d+", message)
    assert any(answers[3].name in line for line in message.partition(f"last lines of {server.log}:")[2].splitlines())
    assert "trial 5" not in message


def test_the_place_of_a_difference_is_found() -> None:
    same = {"a": [1, "x" * 90 + "y"], "b": (None,)}
    assert locate(same, {**same, "a": [1, "x" * 90 + "z"]}).startswith("['a'][1] from 90 on: expected 'xxxx")
    assert locate(same, {**same, "b": (0,)}) == "['b'][0]: expected None, got 0"
    assert locate(same, {**same, "c": 1}) == "['c'] is only in the actual result"
    assert locate([1, 2], [1]) == " from 1 on: expected [1, 2], got [1]; lengths 2, 1"


def test_unknown_promise_is_refused() -> None:
    command = [sys.executable, "-m", "tests.promises.run", "s22"]
    environment = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no promise s22") and done.stderr.count("\n") == 1
    assert KEPT.exists()
