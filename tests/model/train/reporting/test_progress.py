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

from model.train.common.console import duration, print_stderr
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
        self._rows, self._column = [""], 0
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

    def rows(self) -> list[str]:
        """What it shows: understands \\r, \\n, "erase from here" and colors."""
        while select.select([self.master], [], [], 0.01)[0]:
            for part in re.findall(r"\x1b\[\d*[a-zA-Z]|.", os.read(self.master, 1 << 20).decode(), re.DOTALL):
                if part == "\r":
                    self._column = 0
                elif part == "\n":
                    self._rows.append("")
                elif part == "\x1b[J":
                    self._rows[-1] = self._rows[-1][: self._column]
                elif not part.startswith("\x1b"):
                    row = self._rows[-1].ljust(self._column)
                    self._rows[-1] = row[: self._column] + part + row[self._column + 1 :]
                    self._column += 1
        return self._rows


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
            rows = terminal.rows()
            assert len(rows) == 1 and len(rows[0]) < columns
        assert "step 20 " in rows[0]
        print_stderr("a warning")
        report.held_out(20, 1.5)
        *above, below = terminal.rows()
        assert above == ["a warning", "step 20: held-out bits per byte 1.5000 (subset)"] and "held-out 1.500 " in below
    last = terminal.rows()[2:]
    assert last[0].startswith("step 20 loss 2.0000 held-out 1.5000") and last[1:] == [""]


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
    assert terminal.rows()[0].startswith("step 1 loss") and terminal.rows()[1:] == [""]


@pytest.mark.parametrize("redirected", ["stdout", "stderr"])
def test_a_redirected_stream_has_plain_lines_and_the_other_one_the_bar(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redirected: str
) -> None:
    terminal.take_over()
    file = io.StringIO()
    monkeypatch.setattr(sys, redirected, file)
    with _report(tmp_path) as report:
        report.step(progress(1))
        assert terminal.rows()[0].startswith("5.0 % ")
    plain = "step 1 loss 2.0000" if redirected == "stdout" else ""
    assert file.getvalue().startswith(plain) and "\x1b" not in file.getvalue()


def test_a_run_in_the_background_draws_nothing(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    terminal.take_over()
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
    with _report(tmp_path) as report:
        report.step(progress(1))
        assert terminal.rows() == [""]
