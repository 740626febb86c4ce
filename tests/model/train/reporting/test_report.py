"""Reports of a training run: log.jsonl through crashes and resumes, plain lines, and the recent pace."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from model.train.reporting.metrics_log import MetricsLog, read_records, tensorboard_writer
from model.train.reporting.progress import Progress, RateTracker, RunInfo
from model.train.reporting.report import Report
from tests.support import ROOT

OUTLINE = RunInfo(title="nano", measured="held-out", bytes_per_target=2.0, rates={"lr": 0.004, "matrix_lr": 0.02})


def progress(step: int, *, of: int = 20, loss: float = 2.0, seconds: float | None = None) -> Progress:
    """A step of a run that takes a second for each step of 100 tokens."""
    return Progress(
        step=step,
        loss=loss,
        lr_factor=0.5,
        grad_norm=step / 10,
        tokens=100 * step,
        epoch=step / 10,
        fraction=step / of,
        seconds=float(step) if seconds is None else seconds,
    )


def _report(out: Path, first: int, last: int, *, of: int = 20, measure: tuple[int, ...] = ()) -> None:
    with Report(out, OUTLINE, start_step=first - 1, report_seconds=60) as report:
        for step in range(first, last + 1):
            report.step(progress(step, of=of, loss=2.0 + step / 100))
            if step in measure:
                report.held_out(step, 1.5)


def _records(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_every_record_has_every_documented_key_and_each_measurement_stands_where_it_was_made(tmp_path: Path) -> None:
    _report(tmp_path, 1, 20, measure=(10,))
    records = _records(tmp_path)
    table = [line for line in (ROOT / "docs/train-log.md").read_text().splitlines() if line.startswith("| `")]
    keys = {key for line in table for key in re.findall(r"`(\w+)`", line.split("|")[1])}
    keys -= {"held_out", "held_out_whole", "samples"}
    assert len(keys) == 12
    assert all(keys <= set(record) <= {*keys, "held_out"} for record in records)
    assert [record["step"] for record in records if "held_out" in record] == [10]
    assert records[0]["bits_per_byte"] == pytest.approx(2.01 / math.log(2) / 2.0)
    assert (records[0]["lr"], records[0]["matrix_lr"]) == (0.002, 0.01)
    assert records[-1]["tokens_per_second"] == 100.0


def test_a_run_that_went_on_has_the_log_of_one_that_was_never_interrupted(tmp_path: Path) -> None:
    """The last snapshot was made at step 10; steps 11 to 13 were logged, and are computed again."""
    _report(tmp_path / "whole", 1, 20, measure=(5, 15))
    _report(tmp_path / "halves", 1, 13, measure=(5,))
    with (tmp_path / "halves/log.jsonl").open("a") as file:
        file.write('{"step": 14, "lo')  # the power went while this was written
    _report(tmp_path / "halves", 11, 20, measure=(15,))
    whole, halves = ([r | {"tokens_per_second": 0} for r in _records(tmp_path / n)] for n in ("whole", "halves"))
    assert halves == whole


def test_what_weights_knew_before_they_are_trained_on_is_the_record_of_step_0(tmp_path: Path) -> None:
    _report(tmp_path, 1, 20)
    for _ in range(2):  # each run forgets the ones before
        with Report(tmp_path, OUTLINE, start_step=0, report_seconds=60) as report:
            report.held_out(0, 3.5)
            report.step(progress(1, of=5000))
            report.sample(list)
    with Report(tmp_path, OUTLINE, start_step=1, report_seconds=60):
        pass
    assert [(record["step"], record.get("held_out"), record.get("loss")) for record in _records(tmp_path)] == [
        (0, 3.5, None),
        (1, None, 2.0),
    ]


def test_a_long_run_has_about_a_thousand_records_that_miss_no_step(tmp_path: Path) -> None:
    _report(tmp_path, 1, 5000, of=5000)
    records = _records(tmp_path)
    assert 1000 <= len(records) <= 1001
    record = records[1]
    assert record["step"] == 5 and record["loss"] == pytest.approx(2.0 + (2 + 3 + 4 + 5) / 4 / 100)
    assert record["grad_norm"] == 0.5


def test_a_disk_that_was_full_for_a_while_leaves_no_torn_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog(tmp_path / "log.jsonl", OUTLINE, start_step=0)
    log.add({"step": 1, "held_out": math.nan})
    with monkeypatch.context() as patch:

        def full(path: Path, _mode: str) -> None:
            os.truncate(path, path.stat().st_size + 3)
            raise OSError(28, "No space left on device")

        patch.setattr(Path, "open", full)
        log.add({"step": 2})
        log.add({"step": 3})
    assert capsys.readouterr().err.count("training continues") == 1
    log.add({"step": 4})
    records = read_records(tmp_path / "log.jsonl", start_step=4)
    assert records == [{"step": 1, "held_out": None}, {"step": 2}, {"step": 3}, {"step": 4}]


def test_the_speed_is_that_of_the_last_steps_and_the_time_left_follows_the_whole_pace() -> None:
    pace = RateTracker(replace(OUTLINE, flops_per_token=2.0, peak_flops=1000.0))
    pace.add(progress(1, of=2000))
    assert (pace.tokens_per_second, pace.seconds_left, pace.loss) == (0.0, None, 2.0)
    for step in range(2, 1001):
        pace.add(progress(step, of=2000))
    assert (pace.tokens_per_second, pace.mfu, pace.seconds_left) == pytest.approx((100, 0.2, 1000))
    for step in range(1001, 1011):  # six times as fast, but for a measurement of a minute
        pace.add(progress(step, of=2000, seconds=1000.0 + (step - 1000) / 6 + 60 * (step > 1005)))
    assert pace.tokens_per_second == pytest.approx(600)
    assert pace.seconds_left == pytest.approx(990 * 1060.67 / 1009, rel=0.001)


def test_without_a_terminal_there_are_plain_lines_at_an_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("model.train.reporting.progress.time.monotonic", lambda: now[0])
    with Report(tmp_path, OUTLINE, start_step=0, report_seconds=5) as report:
        for step in range(1, 21):
            now[0] += 1
            report.step(progress(step))
        report.held_out(20, 1.5)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "\r" not in out and "\x1b" not in out
    assert lines[0] == "25.0 % step 5  loss 2.000  100 tok/s  15s left  epoch 0.50  MFU n/a  500 tokens"
    assert len(lines) == 5 and lines[-1] == "step 20: held-out bits per byte 1.5000 (subset)"


def test_tensorboard_is_told_what_the_log_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    def writer(folder: str, purge_step: int) -> SimpleNamespace:
        calls.append((folder, purge_step))
        return SimpleNamespace(add_scalar=lambda *call: calls.append(call), flush=lambda: None)

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=writer))
    with Report(tmp_path, OUTLINE, start_step=0, report_seconds=60, tensorboard=tensorboard_writer()) as report:
        report.step(progress(1))
        report.held_out(1, 1.5)
        report.finish(1.25, [])
    assert calls[0] == (str(tmp_path / "tensorboard"), 1)
    assert ("loss", 2.0, 1) in calls and ("held_out", 1.5, 1) in calls and calls[-1] == ("held_out_whole", 1.25, 1)
    assert len(set(calls)) == len(calls), "nothing is reported twice"
    assert "mfu" not in {call[0] for call in calls}, "an unknown value is not plotted"
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"--tensorboard: .*pip install tensorboard"):
        tensorboard_writer()
