"""The benchmark of drawing runs, and its last line is the result as JSON."""

from __future__ import annotations

import json

import pytest

from benchmarks.sampler_micro import main
from benchmarks.sampling import SAMPLING_MODES


@pytest.mark.usefixtures("native_library")
def test_the_last_line_is_one_json_object_with_both_samplers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--vocab", "50", "--rows", "1", "3", "--turns", "2"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert result["benchmark"] == "draw"
    assert [(times["rows"], times["way"]) for times in result["times"]] == [
        (n, way) for n in (1, 3) for way in SAMPLING_MODES
    ]
    assert len(table) == 1 + len(result["times"])
    assert min(min(times["torch_us"], times["native_us"]) for times in result["times"]) > 0
