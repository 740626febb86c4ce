"""The progress line: behind a bar on a terminal, plain elsewhere."""

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

from model.train.reporting.console import ERASE_LINE, duration, print_stderr
from model.train.reporting.report import Report
from tests.model.train.reporting.test_report import OUTLINE, progress


class Terminal:
    """A pseudo terminal; take_over() replaces both standard streams with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.master, slave = pty.openpty()
        self.stream, self.patch = os.fdopen(slave, "w", encoding="utf-8"), monkeypatch
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setattr("model.train.reporting.progress._REDRAW_SECONDS", 0.0)

    def take_over(self) -> None:
        """pytest restores its own streams after a fixture, so the test calls this."""
        for name in ("stdout", "stderr"):
            self.patch.setattr(sys, name, self.stream)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def shown(self) -> list[str]:
        """What was written since the last call, parted where the line is erased."""
        text = ""
        while select.select([self.master], [], [], 0.01)[0]:
            text += os.read(self.master, 1 << 20).decode()
        return text.split(ERASE_LINE)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Of a suite that may have none itself."""
    terminal = Terminal(monkeypatch)
    yield terminal
    monkeypatch.undo()
    with contextlib.suppress(OSError):  # the test has closed the other end
        terminal.stream.close()
    os.close(terminal.master)


def _report(out: Path) -> Report:
    return Report(out, OUTLINE, start_step=0, report_seconds=1e-9)


def test_the_bar_is_one_line_below_all_output_and_ends_clean(terminal: Terminal, tmp_path: Path) -> None:
    terminal.take_over()
    with _report(tmp_path) as report:
        for step, columns in enumerate((80, 30, 200, 80), start=1):
            terminal.resize(columns)
            report.step(progress(step))
            before, bar = terminal.shown()
            assert before == "" and len(bar) <= columns and bar.endswith("\r") and "\n" not in bar
        assert re.fullmatch(r"\[#\.{4}\] 20\.0 % step 4  loss 2\.000  \d+ tok/s  \S+ left  .*\r", bar), bar
        print_stderr("a warning")
        assert terminal.shown() == ["", "a warning\r\n"]
        report.held_out(4, 1.5)
        assert terminal.shown()[1] == "step 4: held-out bits per byte 1.5000 (subset)\r\n"
    *_, last = terminal.shown()
    assert last.startswith("20.0 % step 4  loss 2.000  held-out 1.500") and last.endswith("\r\n")


def test_a_terminal_that_has_gone_ends_nothing(terminal: Terminal, tmp_path: Path) -> None:
    terminal.take_over()
    os.close(terminal.master)
    with _report(tmp_path) as report:
        report.step(progress(1))
    terminal.master = os.open(os.devnull, os.O_RDONLY)


@pytest.mark.parametrize("redirected", ["stdout", "stderr", "both, to a terminal that cannot erase"])
def test_a_redirected_stream_has_plain_lines_and_the_other_one_the_bar(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redirected: str
) -> None:
    terminal.take_over()
    terminal.resize(80)
    file = io.StringIO()
    if redirected.startswith("std"):
        monkeypatch.setattr(sys, redirected, file)
    else:
        monkeypatch.setenv("TERM", "dumb")
    with _report(tmp_path) as report:
        report.step(progress(1))
        expected = "[" if redirected.startswith("std") else "5.0 % step 1"
        assert terminal.shown()[-1].startswith(expected)
    assert file.getvalue().startswith("5.0 % step 1  loss" if redirected == "stdout" else "")
    assert "\x1b" not in file.getvalue()


def test_a_run_in_the_background_draws_nothing(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    terminal.take_over()
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
    with _report(tmp_path) as report:
        report.step(progress(1))
        assert terminal.shown() == [""]


def test_durations_are_in_their_largest_units() -> None:
    assert [duration(seconds) for seconds in (0, 59.4, 59.6, 3570, None)] == ["0s", "59s", "1m", "1h 00m", "?"]
