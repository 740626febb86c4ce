"""Tiny in-process runs of the training script: started, ended by a real signal, inspected."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from model.train.__main__ import main
from model.train.data.batch import Batch
from model.train.step.objective import Objective
from model.train.step.trainer import Trainer
from model.train.training_checkpoint import load_snapshot

SMALL = ["--preset", "nano", "--vocab-size", "300", "--context", "32", "--windows", "4", "--device", "cpu"]
EXACT = ["--dtype", "float32", "--export-dtype", "float32"]
TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--kv-heads", "1"]


def train(text: Path, out: Path, *flags: str) -> int:
    """The command, on a small shape."""
    with pytest.MonkeyPatch.context() as patch:
        shorten_samples(patch)
        return main(["--data", str(text), "--out", str(out), *SMALL, *flags])


def shorten_samples(patch: pytest.MonkeyPatch) -> None:
    """Drawing long ones takes longer than the training here."""
    for module in ("run", "loop"):
        patch.setattr(f"model.train.{module}._SAMPLE_TOKENS", 8)


def train_until(step: int, text: Path, out: Path, *flags: str) -> None:
    """The same, ended by SIGTERM after `step` steps."""
    with pytest.MonkeyPatch.context() as patch:
        signal_after(step, patch)
        assert train(text, out, *flags) == 143


def signal_after(steps: int, patch: pytest.MonkeyPatch) -> None:
    """Sends this process SIGTERM just after so many updates of the weights."""
    update = Trainer.update

    def update_and_signal(learner: Trainer, step: int, lr_factor: float) -> None:
        update(learner, step, lr_factor)
        if step + 1 == steps:
            signal.raise_signal(signal.SIGTERM)

    patch.setattr(Trainer, "update", update_and_signal)


def at_micro_batch(number: int, patch: pytest.MonkeyPatch, deed: Callable[[Tensor], Any]) -> None:
    """Does something to the loss of micro-batch `number` (from 1; counts what is learnt from, not what is measured)."""
    seen, loss_sum = [0], Objective.loss_sum

    def loss_and_deed(objective: Objective, batch: Batch, *scale: float) -> Tensor:
        loss = loss_sum(objective, batch, *scale)
        if torch.is_grad_enabled():
            seen[0] += 1
            if seen[0] == number and (changed := deed(loss)) is not None:
                return changed
        return loss

    patch.setattr(Objective, "loss_sum", loss_and_deed)


def weights_of(out: Path) -> dict[str, Tensor]:
    """What a run exported."""
    return load_file(out / "model.safetensors")


def state_of(out: Path) -> tuple[int, dict[str, Tensor]]:
    """(step, all tensors) of a run's snapshot."""
    found = load_snapshot(out / ".training")
    assert found
    return found[0].step, found[1]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
