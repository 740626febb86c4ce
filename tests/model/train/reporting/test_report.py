"""Reports of a training run: log.jsonl and samples.md through crashes and resumes, what the console shows, the pace."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import os
import pty
import re
import select
import struct
import sys
import termios
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from model.train.reporting.console import duration, print_stderr
from model.train.reporting.metrics_log import MetricsLog, read_records, tensorboard_writer
from model.train.reporting.progress import Progress, RateTracker, RunInfo
from model.train.reporting.report import STAGES, Report
from model.train.reporting.samples import Sample
from tests.support import ROOT

OUTLINE = RunInfo(title="nano", measured="held-out", bytes_per_target=2.0, rates={"lr": 0.004, "matrix_lr": 0.02})


def progress(step: int, *, of: int = 20, loss: float = 2.0, seconds: float | None = None) -> Progress:
    """Progress after a step of 100 tokens that takes a second."""
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


def _report(out: Path, *, every: float = 60) -> Report:
    return Report(out, OUTLINE, start_step=0, report_seconds=every)


def _draw(text: str) -> list[Sample]:
    return [Sample(prompt=prompt, full_text=f"{prompt} {text}") for prompt in ("Once upon", "\u201cWhere?\u201d")]


def _run(
    out: Path, first: int, last: int, *, of: int = 20, measure: Sequence[int] = (), pace: float = 1.0
) -> list[int]:
    """Reports a run with a step every `pace` seconds from step `first` on. Returns the steps with samples."""
    drawn: list[int] = []

    def draw(step: int) -> list[Sample]:
        drawn.append(step)
        return _draw(f"text of {step}")

    with Report(out, OUTLINE, start_step=first - 1, report_seconds=60) as report:
        for step in range(first, last + 1):
            report.step(progress(step, of=of, loss=2.0 + step / 100, seconds=pace * step))
            if step in measure:
                report.held_out(step, 2.0 - step / 100)
            report.sample(lambda step=step: draw(step))
        if last == of:
            report.finish(0.9, _draw("the end"))
    return drawn


def _records(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_records_have_all_documented_keys_and_measurements_are_at_their_steps(tmp_path: Path) -> None:
    _run(tmp_path, 1, 20, measure=(10,))
    records = _records(tmp_path)
    table = [line for line in (ROOT / "docs/train-log.md").read_text().splitlines() if line.startswith("| `")]
    keys = {key for line in table for key in re.findall(r"`(\w+)`", line.split("|")[1])}
    now_and_then = {"held_out", "held_out_whole", "samples"}
    assert len(keys - now_and_then) == 12 and all(keys - now_and_then <= set(record) <= keys for record in records)
    assert [record["step"] for record in records if "held_out" in record] == [10]
    assert records[0]["bits_per_byte"] == pytest.approx(2.01 / math.log(2) / 2.0)
    assert (records[0]["lr"], records[0]["matrix_lr"]) == (0.002, 0.01)
    assert records[-1]["tokens_per_second"] == 100.0


def test_samples_are_generated_at_each_stage_and_at_the_end(tmp_path: Path) -> None:
    assert _run(tmp_path, 1, 100, of=100, measure=range(5, 101, 5), pace=1000) == [round(100 * x) for x in STAGES]
    page = (tmp_path / "samples.md").read_text()
    bits = [(2 + step / 100) / math.log(2) / 2 for step in (1, 5, 100)]  # each target has two bytes
    assert f"**1 %**, step 1, training bits per byte {bits[0]:.4f}:" in page, "no measurement yet"
    assert f"**5 %**, step 5, training bits per byte {bits[1]:.4f}, held-out bits per byte 1.9500:" in page
    assert f"**100 %**, step 100, training bits per byte {bits[2]:.4f}, held-out bits per byte 0.9000:" in page
    first, second = page.split("## ")[1:]
    assert first.startswith("Once upon\n") and second.startswith("\u201cWhere?\u201d\n")
    positions = [first.index(f"> Once upon {text}  \n") for text in ("text of 1", "text of 5", "text of 50", "the end")]
    assert positions == sorted(positions)


def test_resumed_run_has_the_log_and_samples_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """The last snapshot was at step 10; steps 11 to 60 were logged and are computed again."""
    whole, halves, long = tmp_path / "whole", tmp_path / "halves", {"of": 100, "pace": 1000}
    _run(whole, 1, 100, measure=(5, 15), **long)
    _run(halves, 1, 60, measure=(5, 15), **long)
    with (halves / "log.jsonl").open("a") as file:
        file.write('{"step": 61, "lo')  # a power failure during the write
    _run(halves, 11, 12, **long)
    assert "text of 5 " in (halves / "samples.md").read_text()
    assert "text of 20" not in (halves / "samples.md").read_text()
    _run(halves, 13, 100, measure=(15,), **long)
    assert (halves / "samples.md").read_text() == (whole / "samples.md").read_text()
    logs = [[record | {"tokens_per_second": 0} for record in _records(out)] for out in (whole, halves)]
    assert logs[0] == logs[1]
    _run(halves, 1, 1, of=100)
    assert not (halves / "samples.md").exists(), "another run must discard them"


def test_loss_before_training_is_the_record_of_step_0(tmp_path: Path) -> None:
    _run(tmp_path, 1, 20)
    for _ in range(2):  # each run discards earlier ones
        with _report(tmp_path) as report:
            report.held_out(0, 3.5)
            report.step(progress(1, of=5000))
            report.sample(list)
    with Report(tmp_path, OUTLINE, start_step=1, report_seconds=60):
        pass
    assert [(record["step"], record.get("held_out"), record.get("loss")) for record in _records(tmp_path)] == [
        (0, 3.5, None),
        (1, None, 2.0),
    ]


def test_long_run_has_about_a_thousand_records_that_cover_every_step(tmp_path: Path) -> None:
    _run(tmp_path, 1, 5000, of=5000)
    records = _records(tmp_path)
    assert 1000 <= len(records) <= 1001
    record = records[1]
    assert record["step"] == 5 and record["loss"] == pytest.approx(2.0 + (2 + 3 + 4 + 5) / 4 / 100)
    assert record["grad_norm"] == 0.5


def test_temporarily_full_disk_leaves_no_partial_record(
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


def test_speed_is_recent_and_remaining_time_uses_the_average() -> None:
    pace = RateTracker(replace(OUTLINE, flops_per_token=2.0, peak_flops=1000.0))
    pace.add(progress(1, of=2000))
    assert (pace.tokens_per_second, pace.seconds_left, pace.loss) == (0.0, None, 2.0)
    for step in range(2, 1001):
        pace.add(progress(step, of=2000))
    assert (pace.tokens_per_second, pace.mfu, pace.seconds_left) == pytest.approx((100, 0.2, 1000))
    for step in range(1001, 1011):  # six times as fast, except for a measurement of a minute
        pace.add(progress(step, of=2000, seconds=1000.0 + (step - 1000) / 6 + 60 * (step > 1005)))
    assert pace.tokens_per_second == pytest.approx(600)
    assert pace.seconds_left == pytest.approx(990 * 1060.67 / 1009, rel=0.001)


def test_without_a_terminal_there_are_plain_lines_at_an_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("model.train.reporting.progress_display.time.monotonic", lambda: now[0])
    with _report(tmp_path, every=5) as report:
        for step in range(1, 21):
            now[0] += 1
            report.step(progress(step))
        report.held_out(20, 1.5)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "\r" not in out and "\x1b" not in out
    assert lines[0] == "25.0 % step 5  loss 2.000  100 tok/s  15s left  epoch 0.50  MFU n/a  500 tokens"
    assert len(lines) == 5 and lines[-1] == "step 20: held-out bits per byte 1.5000 (subset)"


def test_tensorboard_gets_the_values_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert len(set(calls)) == len(calls), "each record must be reported once"
    assert "mfu" not in {call[0] for call in calls}, "an unknown value must not be plotted"
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"--tensorboard: .*pip install tensorboard"):
        tensorboard_writer()


def test_sampling_takes_at_most_a_hundredth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample is assumed to take half a second at first; then the duration of the last one counts."""
    now = [0.0]
    monkeypatch.setattr("model.train.reporting.report.time.monotonic", lambda: now[0])

    def draw() -> list[Sample]:
        now[0] += 3.0
        return _draw("text")

    drawn = []
    with _report(tmp_path) as report:
        for step in range(1, 1000):
            before = now[0]
            report.step(progress(step, of=1000))
            report.sample(draw)
            drawn += [step] * (now[0] > before)
    assert drawn == [50, 300, 500]


def test_loss_plot_is_written_however_a_run_ends(tmp_path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), _report(tmp_path) as report:
        report.step(progress(1))
        raise KeyboardInterrupt
    assert ElementTree.fromstring((tmp_path / "loss.svg").read_text()).tag.endswith("}svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "loss.svg"]


class Terminal:
    """A pseudo-terminal; take_over() replaces both standard streams with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.master, slave = pty.openpty()
        self.stream, self.patch = os.fdopen(slave, "w", encoding="utf-8"), monkeypatch
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setattr("model.train.reporting.progress_display._REDRAW_SECONDS", 0.0)

    def take_over(self) -> None:
        """pytest restores its own streams after a fixture, so the test calls this itself."""
        for name in ("stdout", "stderr"):
            self.patch.setattr(sys, name, self.stream)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def shown(self) -> list[str]:
        """The output since the last call, split where a line is drawn anew or erased."""
        text = ""
        while select.select([self.master], [], [], 0.01)[0]:
            text += os.read(self.master, 1 << 20).decode()
        return re.split(r"\r(?!\n)(?:\x1b\[J)?", text)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """The terminal of this test; the test run itself may have none."""
    terminal = Terminal(monkeypatch)
    yield terminal
    monkeypatch.undo()
    with contextlib.suppress(OSError):  # the test has closed the other end
        terminal.stream.close()
    os.close(terminal.master)


def test_progress_bar_is_one_line_below_all_output_and_is_erased_at_the_end(terminal: Terminal, tmp_path: Path) -> None:
    terminal.take_over()
    with _report(tmp_path, every=1e-9) as report:
        for step, columns in enumerate((80, 30, 200, 80), start=1):
            terminal.resize(columns)
            report.step(progress(step))
            before, bar = terminal.shown()
            assert before == "" and len(bar.rstrip()) <= columns and "\n" not in bar
        assert re.match(r"\[#{4}\.{16}\] 20\.0 % step 4  loss 2\.000  \d+ tok/s  \S+ left", bar), bar
        print_stderr("a warning")
        assert terminal.shown() == ["", "a warning\r\n"]
        report.held_out(4, 1.5)
        assert terminal.shown()[1] == "step 4: held-out bits per byte 1.5000 (subset)\r\n"
    *_, last = terminal.shown()
    assert last.startswith("20.0 % step 4  loss 2.000  held-out 1.500") and last.endswith("\r\n")


def test_closed_terminal_does_not_end_a_run(terminal: Terminal, tmp_path: Path) -> None:
    terminal.take_over()
    os.close(terminal.master)
    with _report(tmp_path, every=1e-9) as report:
        report.step(progress(1))
    terminal.master = os.open(os.devnull, os.O_RDONLY)


@pytest.mark.parametrize("redirected", ["stdout", "stderr", "both, to a terminal that cannot erase"])
def test_redirected_stream_has_plain_lines_and_the_other_one_the_bar(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redirected: str
) -> None:
    terminal.take_over()
    terminal.resize(80)
    file = io.StringIO()
    if redirected.startswith("std"):
        monkeypatch.setattr(sys, redirected, file)
    else:
        monkeypatch.setenv("TERM", "dumb")
    with _report(tmp_path, every=1e-9) as report:
        report.step(progress(1))
        expected = "[" if redirected.startswith("std") else "5.0 % step 1"
        assert terminal.shown()[-1].startswith(expected)
    assert file.getvalue().startswith("5.0 % step 1  loss" if redirected == "stdout" else "")
    assert "\x1b" not in file.getvalue()


def test_background_run_draws_no_bar(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal.take_over()
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
    with _report(tmp_path, every=1e-9) as report:
        report.step(progress(1))
        assert terminal.shown() == [""]


def test_durations_are_in_their_largest_units() -> None:
    assert [duration(seconds) for seconds in (0, 59.4, 59.6, 3570, None)] == ["0s", "59s", "1m", "1h 00m", "?"]
