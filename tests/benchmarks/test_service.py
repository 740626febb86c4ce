"""The benchmark of the service around the engine runs, and its last line is the result as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.service import main
from tests.support.model.tiny_models import tiny_weights

pytestmark = pytest.mark.slow


@pytest.mark.skipif(sys.platform != "linux", reason="reads CPU time from /proc")
def test_the_last_line_is_one_json_object_with_every_door(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = str(tiny_weights(tmp_path / "weights"))
    flags = ["--streams", "3", "--seconds", "0.6", "--tokens", "5", "--step-ms", "1"]
    assert main(["--weights", weights, *flags]) == 0
    head, *table, last = capsys.readouterr().out.splitlines()
    assert "us/token" in head and len(table) == 2
    result = json.loads(last)
    assert (result["benchmark"], [cost["door"] for cost in result["costs"]]) == ("service", ["complete", "openai"])
    for cost in result["costs"]:
        assert min(cost[name] for name in ("tokens_per_second", "api_us", "engine_us", "load_us", "first_token_ms")) > 0
        assert 0 < cost["gap_p50_ms"] <= cost["gap_p99_ms"]
