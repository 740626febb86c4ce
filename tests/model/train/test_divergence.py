"""Diverged training: exit 3, the last good weights are kept, and no others are ever saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.train.loop import Loop
from model.train.step.trainer import Trainer
from model.train.training_checkpoint import newest_snapshot
from tests.support.model.training_runs import EXACT, TINY, at_micro_batch, same, state_of, train, train_until

pytestmark = pytest.mark.slow


def _nan(loss: Tensor) -> Tensor:
    return loss * float("nan")


def _bad_gradient(loss: Tensor) -> None:
    loss.register_hook(lambda gradient: gradient * float("inf"))


@pytest.mark.parametrize("fault", [_nan, _bad_gradient])
def test_a_fault_ends_with_three_and_the_snapshot_of_before_is_named(
    tmp_path: Path, text: Path, fault: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, flags = tmp_path / "out", [*TINY, *EXACT, "--steps", "5", "--save-seconds", "0.0001"]
    train_until(2, text, tmp_path / "two", *flags)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        at_micro_batch(3, patch, fault)  # type: ignore[arg-type]
        assert train(text, out, *flags) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "in step 3" in error
    assert f"the last good snapshot is {out}/.training/step-00000002" in error
    assert "--lr" in error and "--matrix-lr" in error and "--warm-up" in error
    step, tensors = state_of(out)
    assert step == 2 and same(tensors, state_of(tmp_path / "two")[1])
    assert not (out / "model.safetensors").exists()
    assert train(text, out, *flags, "--resume") == 0


def test_weights_that_an_update_spoilt_are_not_saved(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, update = tmp_path / "out", Trainer.update

    def spoil(learner: Trainer, step: int, lr_factor: float) -> None:
        update(learner, step, lr_factor)
        if step == 1:
            with torch.no_grad():
                learner.decoder.embedding[7, 3] = float("nan")  # a token that no text has

    monkeypatch.setattr(Trainer, "update", spoil)
    assert train(text, out, *TINY, "--steps", "5", "--save-seconds", "0.0001") == 3
    assert "step-00000001" in capsys.readouterr().err
    assert state_of(out)[0] == 1


def test_a_rate_that_is_far_too_high_ends_with_three(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert train(text, out, "--steps", "40", "--lr", "1e30", "--warm-up", "0") == 3
    assert "there is no snapshot yet" in capsys.readouterr().err
    assert newest_snapshot(out / ".training") is None


def test_a_result_that_cannot_be_measured_is_not_written(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "bits_per_byte_of", lambda *_: float("nan"))
    assert train(text, tmp_path / "out", *TINY, "--steps", "1") == 3
    assert "held-out loss became nan" in capsys.readouterr().err
    assert not (tmp_path / "out/model.safetensors").exists()
