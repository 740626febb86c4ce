"""The progress bar: its content at each width, and its output on a terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from model.train.common.console import duration
from model.train.reporting.progress import ProgressBar, Status, bar_line, find_terminal, plain_line
from model.train.reporting.report import Report
from tests.model.train.reporting.test_report import OUTLINE, progress
from tests.support.model.training_runs import TINY, signal_after, train

FULL = Status(
    progress=progress(2560, of=14_880, seconds=3600.0),
    loss=3.6662,
    tokens_per_second=12_345.6,
    mfu=0.314,
    held_out=1.3694,
    seconds_left=7260.0,
)


class Screen:
    """What a terminal shows: understands \\r, \\n, "erase from here" and colours."""

    def __init__(self) -> None:
        self.rows, self.column = [""], 0

    def feed(self, text: str) -> None:
        for part in re.findall(r"\x1b\[\d*[a-zA-Z]|.", text, re.DOTALL):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self.rows.append("")
            elif part == "\x1b[J":
                self.rows[-1] = self.rows[-1][: self.column]
            elif not part.startswith("\x1b"):
                row = self.rows[-1].ljust(self.column)
                self.rows[-1] = row[: self.column] + part + row[self.column + 1 :]
                self.column += 1


class Terminal:
    """A pseudo terminal; take_over() replaces both standard streams with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w", encoding="utf-8")
        self.screen, self.patch = Screen(), monkeypatch
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setattr("model.train.reporting.progress._SECONDS", 0.0)
        self.resize(80)

    def take_over(self) -> None:
        """pytest restores its own streams after a fixture, so the test calls this."""
        for name in ("stdout", "stderr"):
            self.patch.setattr(sys, name, self.stream)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def rows(self) -> list[str]:
        while select.select([self.master], [], [], 0.01)[0]:
            self.screen.feed(os.read(self.master, 1 << 20).decode())
        return self.screen.rows


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """80 columns."""
    terminal = Terminal(monkeypatch)
    yield terminal
    monkeypatch.undo()
    terminal.stream.close()
    os.close(terminal.master)


def test_a_wide_line_says_everything() -> None:
    left, bar, right = bar_line(FULL, 140, filled="#", empty=".")
    assert left == "17.2 % " and bar == "#####........................."
    right_text = "step 2560  loss 3.666  held-out 1.369  12.3k tok/s  MFU 31 %  epoch 256.00  2h 01m left"
    assert right.strip() == right_text


@pytest.mark.parametrize("width", range(1, 141))
def test_a_line_never_is_wider_than_its_terminal(width: int) -> None:
    assert len("".join(bar_line(FULL, width, filled="#", empty="."))) <= width


def test_eighty_columns_have_loss_held_out_speed_and_time_left() -> None:
    line = "".join(bar_line(FULL, 79, filled="#", empty="."))
    assert all(word in line for word in ("17.2 %", " ....", "step 2560", "loss 3.666", "held-out 1.369", "left"))
    narrow = "".join(bar_line(FULL, 30, filled="#", empty="."))
    assert "loss" in narrow and "epoch" not in narrow and "#" in narrow


def test_unknown_values_are_not_made_up() -> None:
    status = Status(progress=progress(1), loss=2.0, tokens_per_second=0.0, mfu=None, held_out=None, seconds_left=None)
    assert plain_line(status) == "step 1 loss 2.0000 tokens 100 epoch 0.10 5.0 % done, ? left"
    drawn = "".join(bar_line(status, 140, filled="#", empty="."))
    assert not [word for word in ("held-out", "tok/s", "MFU") if word in drawn]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m"), (3570, "1h 00m"), (7260, "2h 01m"), (None, "?")],
)
def test_durations_have_two_units_at_most(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


def test_the_bar_is_one_line_that_ends_clean(terminal: Terminal, tmp_path: Path) -> None:
    terminal.take_over()
    with Report(tmp_path, OUTLINE, start_step=0, report_seconds=60) as report:
        for step in range(1, 21):
            report.step(progress(step))
            rows = terminal.rows()
            assert len(rows) == 1 and f"step {step} " in rows[0] and len(rows[0]) < 80
        report.held_out(20, 1.5)
        above, below = terminal.rows()
        assert above == "step 20: held-out bits per byte 1.5000 (subset)" and "held-out 1.500 " in below
    last = terminal.rows()[1:]
    assert last[0].startswith("step 20 loss 2.0000 held-out 1.5000") and last[1:] == [""]


def test_what_others_print_goes_above_the_bar_whole(terminal: Terminal) -> None:
    terminal.take_over()
    with ProgressBar(terminal.stream) as bar:
        bar.draw(lambda width: ("x" * width, "", ""))
        print("a warning", file=sys.stderr)
        bar.draw(lambda width: ("x" * width, "", ""))
        print("half of a line, ", end="", flush=True)
        bar.draw(lambda width: ("x" * width, "", ""))
        assert terminal.rows() == ["a warning", "half of a line, "]
        print("and the rest")
        bar.draw(lambda width: ("x" * width, "", ""))
        assert terminal.rows() == ["a warning", "half of a line, and the rest", "x" * 79]
    assert terminal.rows()[-1] == ""
    assert sys.stdout is terminal.stream and sys.stderr is terminal.stream


def test_a_resized_terminal_gets_a_line_of_its_new_width(terminal: Terminal) -> None:
    terminal.take_over()
    with ProgressBar(terminal.stream) as bar:
        for columns in (80, 30, 200):
            terminal.resize(columns)
            bar.draw(lambda width: ("x" * width, "", ""))
            assert terminal.rows() == ["x" * (columns - 1)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_leaves_the_terminal_as_it_was(terminal: Terminal, error: type[BaseException]) -> None:
    terminal.take_over()
    bar = ProgressBar(terminal.stream)

    def fail() -> None:
        with bar:
            bar.draw(lambda width: ("x" * width, "", ""))
            raise error

    with pytest.raises(error):
        fail()
    assert terminal.rows() == [""]
    assert sys.stdout is terminal.stream


def test_a_terminal_that_has_gone_ends_nothing(terminal: Terminal) -> None:
    terminal.take_over()
    os.close(terminal.master)
    with ProgressBar(terminal.stream) as bar:
        bar.draw(lambda width: ("x" * width, "", ""))
    terminal.master = os.open(os.devnull, os.O_RDONLY)


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("TERM", "")])
def test_there_is_no_bar_where_none_is_wanted(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str
) -> None:
    terminal.take_over()
    monkeypatch.setenv(name, value)
    with Report(tmp_path, OUTLINE, start_step=0, report_seconds=1e-9) as report:
        report.step(progress(1))
    assert terminal.rows()[0].startswith("step 1 loss") and terminal.screen.rows[1:] == [""]


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_a_file_is_no_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, stream: TextIO | None) -> None:
    terminal.take_over()
    monkeypatch.setattr(sys, "stderr", stream)
    assert find_terminal() is terminal.stream
    monkeypatch.setattr(sys, "stdout", stream)
    assert find_terminal() is None


def test_a_redirected_output_has_plain_lines_beside_the_bar(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    terminal.take_over()
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    with Report(tmp_path, OUTLINE, start_step=0, report_seconds=1e-9) as report:
        report.step(progress(1))
        assert terminal.rows()[0].startswith("5.0 % ")
    assert file.getvalue().startswith("step 1 loss 2.0000") and "\x1b" not in file.getvalue()


def test_a_run_in_the_background_draws_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal.take_over()
    foreground: Callable[[int], int] = lambda _: os.getpgrp() + 1  # noqa: E731
    monkeypatch.setattr(os, "tcgetpgrp", foreground)
    with ProgressBar(terminal.stream) as bar:
        bar.draw(lambda width: ("x" * width, "", ""))
    assert terminal.rows() == [""]


def test_ctrl_c_leaves_whole_lines_and_no_bar(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path
) -> None:
    terminal.take_over()
    signal_after(3, monkeypatch, signal.SIGINT)
    assert train(text, tmp_path / "out", "--steps", "12", *TINY) == 130
    rows = terminal.rows()
    assert not [row for row in rows if "tok/s" in row or "\u2591" in row], "the bar is gone"
    starts = ["model: ", "data: ", "plan: ", "saving, then exiting", "step 3 loss", "interrupted by SIGINT"]
    shown = [row for row in rows if any(row.startswith(start) for start in starts)]
    assert [next(s for s in starts if row.startswith(s)) for row in shown] == starts
    assert "--resume" in rows[-2] and rows[-1] == ""
