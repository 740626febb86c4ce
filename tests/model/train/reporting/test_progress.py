"""The progress bar: its content at each width, and its output on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.train.common.console import ERASE_LINE, duration, print_stderr
from model.train.reporting.progress import Status, bar_line, plain_line
from model.train.reporting.report import Report
from tests.model.train.reporting.test_report import OUTLINE, progress

FULL = Status(
    progress=progress(2560, of=14_880, seconds=3600.0),
    loss=3.6662,
    tokens_per_second=12_345.6,
    mfu=0.314,
    held_out=1.3694,
    seconds_left=7260.0,
)


class Terminal:
    """A pseudo terminal of 80 columns; take_over() replaces both standard streams with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.master, slave = pty.openpty()
        self.stream, self.patch = os.fdopen(slave, "w", encoding="utf-8"), monkeypatch
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setattr("model.train.reporting.progress._REDRAW_SECONDS", 0.0)
        self.resize(80)

    def take_over(self) -> None:
        """pytest restores its own streams after a fixture, so the test calls this."""
        for name in ("stdout", "stderr"):
            self.patch.setattr(sys, name, self.stream)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def shown(self) -> list[str]:
        """What was written since the last call, parted where the line is erased; without colors."""
        text = ""
        while select.select([self.master], [], [], 0.01)[0]:
            text += os.read(self.master, 1 << 20).decode()
        return re.sub(r"\x1b\[\d*m", "", text).split(ERASE_LINE)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """80 columns."""
    terminal = Terminal(monkeypatch)
    yield terminal
    monkeypatch.undo()
    with contextlib.suppress(OSError):  # the test has closed the other end
        terminal.stream.close()
    os.close(terminal.master)


def _report(out: Path) -> Report:
    return Report(out, OUTLINE, start_step=0, report_seconds=1e-9)


def test_a_line_has_what_fits_and_makes_nothing_up() -> None:
    left, bar, right = bar_line(FULL, 140)
    assert left == "17.2 % " and bar == "#####........................."
    right_text = "step 2560  loss 3.666  held-out 1.369  12.3k tok/s  MFU 31 %  epoch 256.00  2h 01m left"
    assert right.strip() == right_text
    for width in range(1, 141):
        assert len("".join(bar_line(FULL, width))) <= width
    assert "".join(bar_line(FULL, 30)).split() == ["17.2", "%", "#.........", "loss", "3.666"]
    unknown = Status(progress=progress(1), loss=2.0, tokens_per_second=0.0, mfu=None, held_out=None, seconds_left=None)
    assert plain_line(unknown) == "step 1 loss 2.0000 tokens 100 epoch 0.10 5.0 % done, ? left"
    assert not [word for word in ("held-out", "tok/s", "MFU") if word in "".join(bar_line(unknown, 140))]
    assert [duration(seconds) for seconds in (0, 59.4, 59.6, 3570, None)] == ["0s", "59s", "1m", "1h 00m", "?"]


def test_the_bar_is_one_line_below_all_output_and_ends_clean(terminal: Terminal, tmp_path: Path) -> None:
    terminal.take_over()
    with _report(tmp_path) as report:
        for step, columns in zip(range(1, 21), [80, 30, 200, *[80] * 17], strict=True):
            terminal.resize(columns)
            report.step(progress(step))
            before, bar = terminal.shown()
            assert before == "" and len(bar) <= columns and bar.endswith("\r") and "\n" not in bar
        assert "step 20 " in bar
        print_stderr("a warning")
        assert terminal.shown() == ["", "a warning\r\n"]
        report.held_out(20, 1.5)
        _, message, bar = terminal.shown()
        assert message == "step 20: held-out bits per byte 1.5000 (subset)\r\n" and "held-out 1.500 " in bar
    *_, last = terminal.shown()
    assert last.startswith("step 20 loss 2.0000 held-out 1.5000") and last.endswith("left\r\n")


def test_a_terminal_that_has_gone_ends_nothing(terminal: Terminal, tmp_path: Path) -> None:
    terminal.take_over()
    os.close(terminal.master)
    with _report(tmp_path) as report:
        report.step(progress(1))
    terminal.master = os.open(os.devnull, os.O_RDONLY)


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("TERM", "")])
def test_there_is_no_bar_where_none_is_wanted(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str
) -> None:
    terminal.take_over()
    monkeypatch.setenv(name, value)
    with _report(tmp_path) as report:
        report.step(progress(1))
    (line,) = [part for part in terminal.shown() if part]
    assert line.startswith("step 1 loss") and line.endswith("left\r\n")


@pytest.mark.parametrize("redirected", ["stdout", "stderr"])
def test_a_redirected_stream_has_plain_lines_and_the_other_one_the_bar(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redirected: str
) -> None:
    terminal.take_over()
    file = io.StringIO()
    monkeypatch.setattr(sys, redirected, file)
    with _report(tmp_path) as report:
        report.step(progress(1))
        assert terminal.shown()[1].startswith("5.0 % ")
    plain = "step 1 loss 2.0000" if redirected == "stdout" else ""
    assert file.getvalue().startswith(plain) and "\x1b" not in file.getvalue()


def test_a_run_in_the_background_draws_nothing(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    terminal.take_over()
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
    with _report(tmp_path) as report:
        report.step(progress(1))
        assert terminal.shown() == [""]
