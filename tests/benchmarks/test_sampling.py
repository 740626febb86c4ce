"""The benchmark of sampling runs, and its last line is the result as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.sampling import main
from tests.support.model.tiny_models import tiny_weights

pytestmark = pytest.mark.slow


def test_the_last_line_is_one_json_object_with_every_way_to_draw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--quick", "--weights", str(tiny_weights(tmp_path / "weights"))]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert (result["benchmark"], result["prompt"], result["rounds"]) == ("sampling", 20, 1)
    assert [times["rows"] for times in result["times"]] == [1, 3]
    assert len(table) == 1 + 2 * len(result["times"])
    for times in result["times"]:
        assert min(times["greedy_ms"], times["plain_ms"], times["filters_ms"], times["everything_ms"]) > 0
        assert times["filters_percent"] == pytest.approx(100 * (times["filters_ms"] / times["greedy_ms"] - 1))
