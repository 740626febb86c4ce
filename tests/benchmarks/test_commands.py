"""Each benchmark command runs at tiny sizes, and its last line is the result as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.engine.cpu.toolchain.cpu_target import NEON, this_level
from benchmarks import engine, quality, service, speculation, start, train
from tests.support.model.tiny_models import TEXT, tiny_config, tiny_weights

pytestmark = pytest.mark.slow

Run = Callable[..., tuple[list[str], dict[str, Any]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command; returns the lines it printed and the JSON of the last one."""

    def run(main: Callable[[list[str]], int], *flags: str) -> tuple[list[str], dict[str, Any]]:
        assert main([*flags]) == 0
        *lines, last = capsys.readouterr().out.splitlines()
        return lines, json.loads(last)

    return run


@pytest.fixture
def weights(tmp_path: Path) -> str:
    return str(tiny_weights(tmp_path / "weights", context=2048))


@pytest.mark.usefixtures("native_library")
def test_engine_operations_report_every_kind_of_operation(run: Run) -> None:
    lines, result = run(engine.main, "operations", "--steps", "2", "--stored", "int8")
    assert (result["benchmark"], result["shape"], result["stored"]) == ("operations", "weights", "int8")
    names = {"norm", "q, k, v", "rotate, cache", "attention", "out", "gate, up", "down"}
    for each in result["profiles"]:
        assert set(each["operations_us"]) == names and min(each["operations_us"].values()) > 0
    assert [each["rows"] for each in result["profiles"]] == [1, 8, 32]
    assert len(lines) == 1 + len(names) + 2
    (classic,) = engine.profile(tiny_config(gated=False, out_projection=False), steps=1, rows=(2,))
    assert {"up", "add"} <= set(classic.operations_us) and "out" not in classic.operations_us


@pytest.mark.usefixtures("native_library")
def test_speculation_compares_equal_texts(run: Run, weights: str) -> None:
    sizes = ("--streams", "1,2", "--tokens", "12", "--rounds", "1")
    lines, result = run(speculation.main, "--weights", weights, *sizes)
    assert len(lines) == 1 + 2 * len(speculation.TEXTS)
    assert [each["streams"] for each in result["results"]] == [1] * 5 + [2] * 5
    assert all(each["equal"] and min(each["off"], each["lookup"], each["ratio"]) > 0 for each in result["results"])


@pytest.mark.usefixtures("native_library")
def test_engine_levels_time_each_level(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LEVELS", (this_level(), NEON))
    lines, result = run(engine.main, "levels", "--rounds", "1", "--dtype", "float32")
    assert result["least_ms"].keys() == {f"{what} {this_level().name}" for what in engine.LEVEL_STEPS}
    assert min(result["least_ms"].values()) > 0 and len(lines) == 1 + len(engine.LEVEL_STEPS)


@pytest.mark.usefixtures("native_library")
def test_engine_sampling_reports_every_mode(weights: str, run: Run) -> None:
    lines, result = run(engine.main, "--weights", weights, "sampling", "--quick")
    assert (result["benchmark"], [times["rows"] for times in result["times"]]) == ("sampling", [1, 3])
    assert len(lines) == 1 + 2 * len(result["times"])
    for times in result["times"]:
        assert min(times[f"{mode}_ms"] for mode in engine.SAMPLING_MODES) > 0
        assert times["filters_percent"] == pytest.approx(100 * (times["filters_ms"] / times["greedy_ms"] - 1))


def test_train_compares_with_the_trainer(run: Run) -> None:
    flags = ["--preset", "nano", "--rounds", "1", "--windows", "2", "--micro-windows", "1", "--device", "cpu"]
    _, result = run(train.main, *flags)
    assert (result["benchmark"], result["preset"], result["windows"]) == ("train", "nano", 2)
    rates = result["tokens_per_second"]
    assert result["times_by_second"] == pytest.approx(rates["ours"] / rates["trainer"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads CPU time from /proc")
def test_service_reports_both_endpoints(weights: str, run: Run) -> None:
    flags = ["--streams", "3", "--seconds", "3", "--tokens", "5"]
    (head, *table), result = run(service.main, "--weights", weights, *flags)
    assert "us/token" in head and len(table) == 2
    assert (result["benchmark"], [cost["api"] for cost in result["costs"]]) == ("service", ["complete", "openai"])
    for cost in result["costs"]:
        assert min(cost[name] for name in ("tokens_per_second", "api_us", "engine_us", "load_us", "first_token_ms")) > 0
        assert 0 < cost["gap_p50_ms"] <= cost["gap_p99_ms"]
        assert cost["control_us"] > 0 and cost["alone"] > cost["tokens_per_second"]


def test_start_reports_its_three_times_in_order(weights: str, run: Run) -> None:
    lines, result = run(start.main, "--weights", weights, "--kernels", "auto", "--starts", "1")
    assert len(lines) == 2 and result["benchmark"] == "start"
    (kind,) = result["kinds"]
    assert 0 < kind["live"]["median"] < kind["ready"]["median"] < kind["first_token"]["median"]


def test_a_service_that_does_not_start_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start.main(["--weights", str(tmp_path / "nothing")]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "the service does not start" in printed.err and "nothing" in printed.err


@pytest.mark.usefixtures("native_library")
def test_quality_scores_a_text_in_every_number_format(tmp_path: Path, weights: str, run: Run) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (_, *table), result = run(
        quality.main, "--weights", weights, "--text", str(tmp_path / "text.txt"), "--tokens", "700"
    )
    assert (result["benchmark"], result["tokens"], len(table)) == ("quality", 700, 25)
    bits = result["bits_per_byte"]
    assert bits["native float32"] == pytest.approx(bits["torch float32"], rel=1e-5)
    for kind in ("int8", "int4"):
        assert bits[f"native float32 {kind}"] == pytest.approx(bits[f"torch float32 {kind}"], rel=1e-5)
        assert bits[f"native float32 {kind}"] != pytest.approx(bits["native float32"], rel=1e-5), (
            "no number was rounded"
        )
    assert bits["native float32 kv_int8"] == pytest.approx(bits["torch float32 kv_int8"], rel=1e-4)
    assert bits["native float32 kv_int8"] != pytest.approx(bits["native float32"], rel=1e-6), "no key was rounded"
    assert bits["emulated bfloat16 fp8"] == pytest.approx(bits["torch bfloat16"], rel=0.05)
    assert bits["emulated bfloat16 fp8"] != pytest.approx(bits["torch bfloat16"], rel=1e-5), "no number was rounded"
    assert bits["native bfloat16"] == pytest.approx(bits["torch float32"], rel=0.05)


@pytest.mark.parametrize(("text", "weights_name"), [("none", "weights"), ("empty", "weights"), ("text", "none")])
def test_quality_reports_unreadable_input_in_one_line(
    tmp_path: Path, weights: str, capsys: pytest.CaptureFixture[str], text: str, weights_name: str
) -> None:
    assert weights.endswith("weights")
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "empty").touch()
    with pytest.raises(SystemExit, match="2"):
        quality.main(["--weights", str(tmp_path / weights_name), "--text", str(tmp_path / text)])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
