"""The benchmarks of the bare engine run, and their last line is the result as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import main, profile
from tests.support.model.tiny_models import tiny_config, tiny_weights


def results_of(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    """The number of lines before the last one, and what that holds."""
    assert main(flags) == 0
    *table, last = capsys.readouterr().out.splitlines()
    return len(table), json.loads(last)


@pytest.mark.usefixtures("native_library")
def test_operations_report_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    lines, result = results_of(capsys, "operations", "--steps", "2", "--int8")
    assert (result["benchmark"], result["shape"], result["int8"]) == ("operations", "default", True)
    names = {"norm", "q, k, v", "rotate, cache", "attention", "out", "gate, up", "down"}
    for each in result["profiles"]:
        assert set(each["operations_us"]) == names and min(each["operations_us"].values()) > 0
    assert [each["rows"] for each in result["profiles"]] == [1, 8, 32]
    assert lines == 1 + len(names) + 2


@pytest.mark.usefixtures("native_library")
def test_every_layout_has_its_own_operations() -> None:
    (classic,) = profile(tiny_config(gated=False, out_projection=False), steps=1, rows=(2,))
    assert {"up", "add"} <= set(classic.operations_us) and "out" not in classic.operations_us


@pytest.mark.slow
@pytest.mark.usefixtures("native_library")
def test_sampling_reports_every_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = str(tiny_weights(tmp_path / "weights"))
    lines, result = results_of(capsys, "--weights", weights, "sampling", "--quick")
    assert (result["benchmark"], result["prompt"], result["rounds"]) == ("sampling", 20, 1)
    assert [times["rows"] for times in result["times"]] == [1, 3]
    assert lines == 1 + 2 * len(result["times"])
    for times in result["times"]:
        assert min(times["greedy_ms"], times["plain_ms"], times["filters_ms"], times["everything_ms"]) > 0
        assert times["filters_percent"] == pytest.approx(100 * (times["filters_ms"] / times["greedy_ms"] - 1))


@pytest.mark.slow
def test_guided_reports_what_a_schema_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = str(tiny_weights(tmp_path / "weights"))
    flags = ["--streams", "2", "--max-tokens", "8", "--repeats", "1"]
    lines, result = results_of(capsys, "--weights", weights, "--kernels", "torch", "guided", *flags)
    assert (result["benchmark"], result["streams"], lines) == ("guided", 2, 2)
    free, guided = result["free_tokens_per_second"], result["guided_tokens_per_second"]
    assert result["cost_percent"] == pytest.approx(100 * (1 - guided / free))
    assert min(result["compile_ms"], result["guides_ms_per_step"]) > 0
