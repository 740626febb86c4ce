"""Tiny in-process training runs: starts them, interrupts them by real signals, and inspects their files."""

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
    """Runs the training command with a small shape."""
    with pytest.MonkeyPatch.context() as patch:
        shorten_samples(patch)
        return main(["--data", str(text), "--out", str(out), *SMALL, *flags])


def shorten_samples(patch: pytest.MonkeyPatch) -> None:
    """Shortens the text samples of a run, which would take longer than its training."""
    for module in ("run", "loop"):
        patch.setattr(f"model.train.{module}._SAMPLE_TOKENS", 8)


def train_until(step: int, text: Path, out: Path, *flags: str) -> None:
    """Runs train(), ended by SIGTERM after `step` steps."""
    with pytest.MonkeyPatch.context() as patch:
        signal_after(step, patch)
        assert train(text, out, *flags) == 143


def signal_after(steps: int, patch: pytest.MonkeyPatch) -> None:
    """Sends this process SIGTERM right after `steps` weight updates."""
    update = Trainer.update

    def update_and_signal(trainer: Trainer, step: int, lr_factor: float) -> None:
        update(trainer, step, lr_factor)
        if step + 1 == steps:
            signal.raise_signal(signal.SIGTERM)

    patch.setattr(Trainer, "update", update_and_signal)


def at_micro_batch(number: int, patch: pytest.MonkeyPatch, action: Callable[[Tensor], Any]) -> None:
    """Calls `action` with the loss of training micro-batch `number` (from 1); a result replaces the loss."""
    seen, loss_sum = [0], Objective.loss_sum

    def loss_and_action(objective: Objective, batch: Batch, *scale: float) -> Tensor:
        loss = loss_sum(objective, batch, *scale)
        if torch.is_grad_enabled():
            seen[0] += 1
            if seen[0] == number and (changed := action(loss)) is not None:
                return changed
        return loss

    patch.setattr(Objective, "loss_sum", loss_and_action)


def weights_of(out: Path) -> dict[str, Tensor]:
    """The exported weights of a run."""
    return load_file(out / "model.safetensors")


def state_of(out: Path) -> tuple[int, dict[str, Tensor]]:
    """(step, all tensors) of a run's checkpoint."""
    found = load_snapshot(out / ".training")
    assert found
    return found[0].step, found[1]


def is_identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether both have the same tensors, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
