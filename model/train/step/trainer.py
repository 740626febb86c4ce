"""What learns: a decoder, its optimiser and the average of its weights. One step, and all its state. Knows no files."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from model.train.common.thread_pool import in_shares
from model.train.data.batch import Batch
from model.train.data.text_file import DataError
from model.train.step.distributed import ProcessGroup
from model.train.step.ema import WeightAverage
from model.train.step.objective import Objective
from model.train.step.optimizer import ParameterUpdates

_AT_ONCE = 2048
"""Tokens that a CPU computes at once: enough for its caches to be worth it, few enough to stay in them."""


class Trainer:
    """A step is gradients(), then update(); what is between them may look at the gradients and refuse them."""

    def __init__(
        self,
        objective: Objective,
        optimiser: ParameterUpdates,
        *,
        ema: float,
        ranks: ProcessGroup,
        micro_windows: int | None,
    ) -> None:
        self.objective, self.optimiser, self.ranks = objective, optimiser, ranks
        self.decoder = objective.decoder
        self.average = WeightAverage(self.decoder, ema) if ema else None
        self.micro_windows = micro_windows
        """Rows at once; None: as many as fit."""
        self._may_shrink = micro_windows is None

    def gradients(self, batch: Batch, breathe: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """(mean loss in nats per target, norm of its gradient) over the rows of all ranks; clips the gradients.

        breathe: called before each micro-batch. Where it raises, the state is that of the last whole step.
        """
        share, n_targets = self.ranks.share(batch), batch.n_targets
        while True:
            try:
                loss = self._accumulate(share, n_targets, breathe)
                break
            except torch.OutOfMemoryError:
                self._shrink(len(share.inputs_RN))
        gradients = [p.grad for p in self.decoder.parameters() if p.grad is not None]
        self.ranks.add_up([loss, *gradients])
        # One wait for the device in a step: everything after it is launched while the update runs.
        nats, norm = torch.stack([loss.float(), self.optimiser.clip().float()]).tolist()
        return nats, norm

    def update(self, step: int, lr_factor: float) -> None:
        """Moves the weights along the gradients, and the average after them. step: how many were done before."""
        self.optimiser.step(lr_factor)
        if self.average:
            self.average.update(step + 1)

    def averaged(self) -> AbstractContextManager[None]:
        """Within the block, the decoder has the weights that are measured and exported."""
        return self.average.in_place() if self.average else nullcontext()

    def is_finite(self) -> bool:
        """Whether every weight is a number."""
        return all(bool(parameter.isfinite().all()) for parameter in self.decoder.parameters())

    def tensors(self) -> dict[str, Tensor]:
        """All state by name. What is random (the first weights, the order of the data) comes from the seed alone."""
        weights = {f"decoder.{name}": tensor for name, tensor in self.decoder.state_dict().items()}
        average = self.average.tensors() if self.average else {}
        return weights | self.optimiser.tensors() | {f"ema.{name}": tensor for name, tensor in average.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of tensors()."""
        self.decoder.load_state_dict(below("decoder", tensors))
        self.optimiser.load_tensors(dict(tensors))
        if self.average:
            self.average.load_tensors(below("ema", tensors))

    def take_micro_windows(self, kept: str) -> None:
        """Goes on with as many rows at once as a snapshot names, unless a flag says how many."""
        if self._may_shrink and kept != "auto":
            self.micro_windows = int(kept)

    @property
    def workers(self) -> int:
        """How many micro-batches are computed side by side, where there are so many."""
        return torch.get_num_threads() if self.objective.computing.by_hand else 1

    def rows_at_once(self, share: Batch) -> int:
        """How many of these rows make a micro-batch."""
        if self.micro_windows is not None:
            return self.micro_windows
        if self.objective.device.type == "cuda":
            return len(share.inputs_RN)
        return max(2, _AT_ONCE // share.row_tokens)

    def _accumulate(self, share: Batch, n_targets: int, breathe: Callable[[], None]) -> Tensor:
        """Adds up the gradients of a share, micro-batch after micro-batch. Returns its part of the mean loss."""
        self.decoder.zero_grad(set_to_none=True)
        parameters, caller = list(self.decoder.parameters()), threading.get_ident()

        def learn(parts: Sequence[Batch]) -> tuple[Tensor, list[Tensor]]:
            losses: list[Tensor] = []
            sums: list[Tensor] = []
            for part in parts:
                if threading.get_ident() == caller:  # what it may raise is the run's
                    breathe()
                loss = self.objective.loss_sum(part, 1 / n_targets)
                found = torch.autograd.grad(loss, parameters, materialize_grads=True)
                sums = [a.add_(b) for a, b in zip(sums, found, strict=True)] if sums else list(found)
                losses.append(loss.detach())
            return torch.stack(losses).sum(), sums

        with self.objective.at_once():
            parts = share.split(self.rows_at_once(share))
            learned = in_shares(learn, parts, self.workers)
        for i, parameter in enumerate(parameters):
            parameter.grad = functools.reduce(Tensor.add_, (sums[i] for _, sums in learned))
        return torch.stack([loss for loss, _ in learned]).sum()

    def _shrink(self, rows: int) -> None:
        """Half as many rows at once, as the device has not enough memory for more."""
        tried = min(rows, self.micro_windows or rows)
        if tried == 1 or not self._may_shrink:
            raise DataError(
                f"{tried} windows at once do not fit into the device's memory: lower --micro-windows or --context"
            ) from None
        self.decoder.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        self.micro_windows = (tried + 1) // 2


def below(owner: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors named owner.NAME, by NAME."""
    return {name.removeprefix(f"{owner}."): t for name, t in tensors.items() if name.startswith(f"{owner}.")}
