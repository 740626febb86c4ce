"""The training script, end to end: a served model from text, exact resume, signals, bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.checkpoint.checkpoint import load
from model.checkpoint.golden import verify
from model.train.step.trainer import Trainer
from tests.support.completion_client import whole
from tests.support.model.training_runs import train
from tests.support.servers import start_server, stop_server

pytestmark = pytest.mark.slow


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


def test_running_out_of_memory_is_one_line(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "gradients", lambda *_: torch.empty(1 << 62, dtype=torch.int8))
    assert train(text, tmp_path / "out", "--steps", "1") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: out of memory") and error.count("\n") == 1


def test_a_terminal_without_unicode_loses_no_result(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "printed").open("w", encoding="ascii") as printed:
        monkeypatch.setattr("sys.stdout", printed)
        assert train(text, tmp_path / "out", "--steps", "1") == 0
    assert "?I don?t believe you" in (tmp_path / "printed").read_text()
