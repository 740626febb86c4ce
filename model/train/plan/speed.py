"""How fast a shape learns on a device, and what a micro-batch of it keeps in memory: a few real ones. No files."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import ModelConfig
from model.device import choose_dtype
from model.train.data.batch import Batch, Sources, of_windows
from model.train.learner import Learner
from model.train.objective import Objective
from model.train.optimiser import Optimiser
from model.train.ranks import Ranks
from model.transformer import Decoder

_TIMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """As measured."""

    row_seconds: float
    update_seconds: float
    micro_rows: int
    """Rows at once."""
    activations: int
    """Bytes that the backward pass of so many rows needs of the forward pass."""

    def step_seconds(self, rows: int) -> float:
        """Of a step over so many rows."""
        return rows * self.row_seconds + self.update_seconds


def measure(shape: ModelConfig, options: argparse.Namespace, device: torch.device, row_tokens: int) -> Speed:
    """Trains a new decoder on noise, once to warm up and then a few times."""
    decoder = Decoder(shape).initialise(0).to(device)
    rates = {"matrix_lr": options.matrix_lr, "other_lr": options.lr, "weight_decay": options.weight_decay}
    optimiser = Optimiser(decoder, options.optimizer, **rates)
    objective = Objective(decoder, device, choose_dtype(options.dtype, device))
    learner = Learner(objective, optimiser, ema=0.0, ranks=Ranks(), micro_windows=options.micro_windows)
    batch = _noise(shape, options.windows, row_tokens)
    one = batch.split(learner.rows_at_once(batch))[0]
    part = batch.split(len(one.inputs_RN) * learner.workers)[0]  # as in a run, a micro-batch for each thread
    rows = len(part.inputs_RN)
    activations = _kept_by(lambda: learner.gradients(one), decoder) * rows // len(one.inputs_RN)
    learner.update(0, 0.0)
    return Speed(
        row_seconds=_seconds(lambda: learner.gradients(part), device) / rows,
        update_seconds=_seconds(lambda: learner.optimiser.step(0.0), device, before=lambda: learner.gradients(part)),
        micro_rows=rows,
        activations=activations,
    )


def _noise(shape: ModelConfig, rows: int, row_tokens: int) -> Batch:
    tokens_RN = torch.randint(shape.vocab_size, (rows, row_tokens + 1), generator=torch.Generator().manual_seed(0))
    batch = of_windows(tokens_RN)
    if not shape.n_encoder_layers:
        return batch
    read = Sources(tokens_RS=batch.inputs_RN, real_RS=torch.ones_like(batch.inputs_RN, dtype=torch.bool))
    return Batch(inputs_RN=batch.inputs_RN, targets_RN=batch.targets_RN, sources=read)


def _kept_by(work: Callable[[], object], decoder: Decoder) -> int:
    """Bytes of the storages that autograd saves during `work`, but the parameters' own."""
    own = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        work()
    return sum(kept.values())


def _seconds(work: Callable[[], object], device: torch.device, before: Callable[[], object] = lambda: None) -> float:
    """The least of a few times: whatever else the machine does only ever adds."""
    measured = []
    for _ in range(_TIMES):
        before()
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        measured.append(time.perf_counter() - started)
    return min(measured)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
