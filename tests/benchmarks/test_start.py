"""The benchmark of starts runs, and its last line is the result as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.start import Range, StartupTimes, main, summarize
from tests.support.model.tiny_models import tiny_weights

pytestmark = pytest.mark.slow


def test_the_last_line_is_one_json_object_with_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = str(tiny_weights(tmp_path / "weights"))
    assert main(["--weights", weights, "--kernels", "torch", "--starts", "1"]) == 0
    head, *table, last = capsys.readouterr().out.splitlines()
    assert "first token" in head
    assert len(table) == 1
    result = json.loads(last)
    assert result["benchmark"] == "start"
    (kind,) = result["kinds"]
    assert 0 < kind["live"]["median"] < kind["ready"]["median"] < kind["first_token"]["median"]


def test_a_service_that_does_not_start_is_told_in_its_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--weights", str(tmp_path / "nothing"), "--starts", "1"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "does not start" in printed.err and "nothing" in printed.err


def test_starts_are_summed_up_by_their_median_and_range() -> None:
    starts = [StartupTimes(live=live, ready=2.0, first_token=3.0) for live in (0.5, 0.1, 0.2)]
    found = summarize("native", starts)
    assert (found.starts, found.live) == (3, Range(median=0.2, least=0.1, most=0.5))
