"""Gradients of one step: the same for any micro-batch size, halved when memory runs out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.train.data.batch import Batch, batch_of_windows
from model.train.data.sources import DataError
from model.train.step.distributed import ProcessGroup
from model.train.step.objective import Objective
from model.train.step.optimizer import ParameterUpdates
from model.train.step.trainer import Trainer
from tests.support.model.tiny_models import tiny_decoder

BATCH = batch_of_windows(torch.randint(300, (6, 17), generator=torch.Generator().manual_seed(1)))


def _learner(micro_windows: int | None) -> Trainer:
    decoder = tiny_decoder().requires_grad_(True)
    objective = Objective(decoder, torch.device("cpu"), torch.float32)
    optimiser = ParameterUpdates(decoder, "adamw", matrix_lr=0.02, other_lr=0.001, weight_decay=0.0)
    return Trainer(objective, optimiser, ema=0.0, ranks=ProcessGroup(), micro_windows=micro_windows)


def _gradient(learner: Trainer) -> Tensor:
    learner.gradients(BATCH)
    assert learner.decoder.embedding.grad is not None
    return learner.decoder.embedding.grad


def _memory_for(rows: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands in for a device; what was tried."""
    tried, loss_sum = [], Objective.loss_sum

    def within_memory(objective: Objective, batch: Batch, *scale: float) -> Tensor:
        tried.append(len(batch.inputs_RN))
        if tried[-1] > rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_sum(objective, batch, *scale)

    monkeypatch.setattr(Objective, "loss_sum", within_memory)
    return tried


def test_what_is_computed_at_once_decides_nothing_but_rounding() -> None:
    whole = _gradient(_learner(6))
    for rows in (1, 2, 4):
        assert torch.allclose(_gradient(_learner(rows)), whole, atol=1e-6)


def test_half_as_many_rows_are_taken_where_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _gradient(_learner(2))
    learner = _learner(None)
    tried = _memory_for(2, monkeypatch)
    assert torch.equal(_gradient(learner), expected)
    assert tried == [6, 3, 2, 2, 2] and learner.micro_windows == 2
    tried.clear()
    learner.gradients(BATCH)
    assert tried == [2, 2, 2]


def test_what_a_flag_asks_for_is_not_changed_but_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _memory_for(2, monkeypatch)
    with pytest.raises(DataError, match="4 windows at once do not fit"):
        _learner(4).gradients(BATCH)
    _memory_for(0, monkeypatch)
    with pytest.raises(DataError, match="lower --micro-windows or --context"):
        _learner(None).gradients(BATCH)


def test_a_snapshot_says_how_many_rows_unless_a_flag_does() -> None:
    for flag, kept, then in ((None, "4", 4), (None, "auto", None), (2, "4", 2)):
        learner = _learner(flag)
        learner.restore_micro_windows(kept)
        assert learner.micro_windows == then
