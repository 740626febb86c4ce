"""The benchmark of several engines runs, and its last line is the result as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.replicas import main
from tests.support.model.tiny_models import tiny_weights

pytestmark = pytest.mark.slow


def test_the_last_line_is_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = str(tiny_weights(tmp_path / "weights", context=2048))
    flags = ["--threads", "2", "--streams", "3", "--max-tokens", "5", "--rounds", "1"]
    assert main(["--weights", weights, *flags]) == 0
    sentence, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert (result["benchmark"], result["replicas"], result["streams"]) == ("replicas", 2, 3)
    assert result["speed_up"] == pytest.approx(
        result["several_tokens_per_second"] / result["one_tokens_per_second"], rel=0.01
    )
    assert f"{result['speed_up']:.2f} times" in sentence


def test_a_service_that_does_not_start_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--weights", str(tmp_path / "nothing")]) == 1
    assert "the service does not start" in capsys.readouterr().err
