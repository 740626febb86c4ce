"""The training script, end to end: a served model from text, exact resume, signals, bad input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, start_server, stop_server
from safetensors.torch import load_file
from tiny import TEXT
from training import SMALL, train, train_until, write_text
from wire import whole

from model.checkpoint import load
from model.golden import verify
from model.train.position import Position
from model.train.snapshot import load_snapshot, save_snapshot


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file to learn from."""
    return write_text(tmp_path)


def _bits(printed: str) -> float:
    line = next(line for line in printed.splitlines() if line.startswith("held-out bits per byte"))
    return float(line.split()[4])


def test_training_learns_and_leaves_a_directory_that_serves(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    assert train(text, out, "--steps", "2", "--export-dtype", "float32") == 0
    early = _bits(capsys.readouterr().out)
    assert train(text, out, "--steps", "60", "--overwrite") == 0
    printed = capsys.readouterr().out
    assert _bits(printed) < 0.7 * early
    assert printed.splitlines()[-1].endswith(f" -m app serve --weights {out}")
    card = (out / "README.md").read_text()
    checkpoint = load(out, device=torch.device("cpu"), dtype=torch.float32)
    version, difference = checkpoint.version, verify(checkpoint.decoder, out)
    assert difference is not None and difference < 1e-5
    assert version in card and "--steps 60" not in card[: card.index("Command")]
    assert "| seed | 1 |" in card and "60 steps" in card
    server = start_server(tmp_path, out)
    try:
        answer = whole(server.url, prompt="Once upon a", max_tokens=8, temperature=0)
        assert " time" in answer["choices"][0]["text"]
    finally:
        assert stop_server(server) == 0


def test_ten_steps_resumed_for_ten_more_equal_twenty_bit_for_bit(tmp_path: Path, text: Path) -> None:
    flags = ["--dtype", "float32", "--export-dtype", "float32"]
    assert train(text, tmp_path / "whole", "--steps", "20", *flags) == 0
    train_until(10, text, tmp_path / "halves", "--steps", "20", *flags)
    assert not (tmp_path / "halves/model.safetensors").exists()
    assert train(text, tmp_path / "halves", "--steps", "20", *flags, "--resume") == 0
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "halves")]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


def test_a_signal_saves_and_names_the_command_that_goes_on(tmp_path: Path, text: Path) -> None:
    command = [sys.executable, "-m", "model.train", "--data", str(text), "--out", str(tmp_path / "out"), *SMALL]
    flags = ["--max-minutes", "5", "--report-seconds", "0.1", "--overwrite"]
    process = subprocess.Popen([*command, *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    while "loss" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert errors.rstrip().endswith("--resume")
    assert "--overwrite" not in errors
    found = load_snapshot(tmp_path / "out/.training")
    assert found and found[0].step > 0


def test_a_run_that_stands_there_is_neither_lost_nor_continued_by_accident(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    train_until(2, text, out, "--steps", "4")
    capsys.readouterr()
    assert train(text, out, "--steps", "4") == 2
    assert "--resume" in capsys.readouterr().err
    assert train(text, out, "--steps", "4", "--resume", "--context", "16") == 2
    assert "another shape" in capsys.readouterr().err
    text.write_text(TEXT * 4)
    assert train(text, out, "--steps", "4", "--resume") == 2
    assert "other data" in capsys.readouterr().err


def test_a_run_goes_on_only_with_the_flags_that_it_had(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--steps", "2", "--dtype", "float32", "--lr", "0.003"]
    out = tmp_path / "out"
    train_until(1, text, out, *flags)
    others = ["--seed 2", "--windows 5", "--matrix-lr 0.1", "--lr 0.1", "--weight-decay 0.1", "--dtype bfloat16"]
    for other in [*others, "--optimizer adamw", "--lr 0.1 --seed 3"]:
        capsys.readouterr()
        assert train(text, out, *flags, *other.split(), "--resume") == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        named = [word for word in error.split() if word.startswith("--")]
        assert sorted(named) == sorted([*other.split()[::2], "--overwrite"])
    assert " had --seed 1 --lr 0.003; give the same" in error
    assert train(text, out, *flags, "--resume") == 0


def test_overwriting_forgets_the_old_run(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    assert train(text, out, "--steps", "6") == 0
    train_until(2, text, out, "--steps", "4", "--overwrite")
    found = load_snapshot(out / ".training")
    assert found
    assert found[0].step == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--max-minutes"),
        (["--steps", "1", "--data", "/nonexistent"], "no such file"),
        (["--steps", "1", "--vocab-size", "5000"], "supports only"),
        (["--steps", "1", "--vocab-size", "100"], "257"),
        (["--steps", "1", "--context", "100000"], "too few"),
        (["--steps", "1", "--about", "/nonexistent"], "--about"),
        (["--steps", "1", "--out", "/proc/nothing"], "/proc/nothing"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_two(
    tmp_path: Path, text: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(text, tmp_path / "out", *flags) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


def test_a_loss_that_is_not_finite_ends_with_three_and_keeps_the_last_snapshot(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    train_until(1, text, out, "--steps", "40", "--lr", "1e30")
    assert train(text, out, "--steps", "40", "--lr", "1e30", "--resume") == 3
    assert "snapshot" in capsys.readouterr().err
    found = load_snapshot(out / ".training")
    assert found and found[0].step == 1


def test_the_newest_readable_snapshot_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def position(step: int) -> Position:
        return Position(step=step, seconds=1.0, digest="d", shape="s", flags={})

    save_snapshot(tmp_path, position(1), {"x": torch.ones(1)})
    older = tmp_path / "kept"
    (tmp_path / "step-00000001").rename(older)
    save_snapshot(tmp_path, position(2), {"x": torch.ones(1)})
    older.rename(tmp_path / "step-00000001")
    (tmp_path / "step-00000002/state.safetensors").write_bytes(b"torn")
    (tmp_path / ".step-00000003").mkdir()
    found = load_snapshot(tmp_path)
    assert found
    assert found[0].step == 1
    assert "damaged" in capsys.readouterr().out
    save_snapshot(tmp_path, position(2), {"x": torch.zeros(1)})
    found = load_snapshot(tmp_path)
    assert found
    assert found[0].step == 2, "a damaged snapshot is replaced by a good one of the same step"


def test_kill_nine_at_any_moment_leaves_a_run_that_goes_on(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "model.train", "--data", str(text), "--out", str(out), *SMALL, "--steps", "100000"]
    flags = ["--save-seconds", "0.01", "--resume"]
    reached = 0
    for i in range(3):
        process = subprocess.Popen([*command, *flags], cwd=ROOT, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while _newest_step(out) <= reached + 5 and time.monotonic() < deadline:
            time.sleep(0.001 * i)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        found = load_snapshot(out / ".training")
        assert found
        assert found[0].step > reached, "each life was meant to go on from the one before"
        reached = found[0].step


def _newest_step(out: Path) -> int:
    return max([int(path.name.removeprefix("step-")) for path in (out / ".training").glob("step-*")], default=0)
