"""One training step and its state: decoder, optimizer, averaged weights, best weights."""

from __future__ import annotations

import argparse
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from model.device import choose_dtype
from model.nn.transformer import Decoder
from model.train.data.batch import Batch
from model.train.data.sources import DataError
from model.train.step.distributed import GradientSums, ProcessGroup
from model.train.step.objective import Objective, choose_loss_backend
from model.train.step.optimizer import ParameterUpdates
from model.train.step.thread_pool import map_shares, run_each

_CPU_MICRO_BATCH_TOKENS = 2048
"""Tokens per micro-batch on a CPU: large enough to be efficient, small enough to fit into the caches."""


class WeightAverage:
    """Exponential moving average of a decoder's parameters, a float32 copy.

    The decay of early steps is lower, at most (1 + s) / (10 + s) at step s, so that the average forgets the random
    initialization. Off by default: no gain on a linear schedule (held-out bits per byte of nano after 300 steps of
    1,024 tokens: 1.874 without, 1.877 with any decay from 0.9 to 0.995).
    """

    def __init__(self, decoder: Decoder, decay: float) -> None:
        self.decay = decay
        self._parameters = dict(decoder.named_parameters())
        self.tensors = {name: p.detach().float().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Adds the weights after `step` steps to the average."""
        weight = 1.0 - min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(
            list(self.tensors.values()), [p.detach().float() for p in self._parameters.values()], weight
        )

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swaps the averaged weights into the decoder within the block."""
        saved = {name: p.detach().clone() for name, p in self._parameters.items()}
        copy_tensors(self.tensors, self._parameters)
        try:
            yield
        finally:
            copy_tensors(saved, self._parameters)


class BestWeights:
    """A copy of the best evaluated weights, in CPU memory, with their step and bits per byte."""

    def __init__(self) -> None:
        self.step = 0
        self.bits = math.inf
        self.tensors: dict[str, Tensor] = {}

    def keep_if_best(self, decoder: Decoder, step: int, bits: float) -> None:
        """Copies the decoder's weights if they are the best so far; the first of equal ones wins."""
        if bits < self.bits:
            self.step, self.bits = step, bits
            # Copy explicitly: .cpu() alone would share memory with weights on the CPU.
            self.tensors = {name: p.detach().to("cpu", copy=True) for name, p in decoder.named_parameters()}


@torch.no_grad()
def copy_tensors(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Copies values by name, for all names of the target."""
    for name, tensor in target.items():
        tensor.copy_(source[name])


def build_trainer(
    decoder: Decoder, options: argparse.Namespace, device: torch.device, ranks: ProcessGroup | None = None
) -> Trainer:
    """The trainer of a decoder on this device, with the flags applied. Raises ValueError."""
    backend = choose_loss_backend(options.compile, device.type, has_encoder=decoder.config.n_encoder_layers > 0)
    objective = Objective(decoder, device, choose_dtype(options.dtype, device), backend)
    optimizer = ParameterUpdates(
        decoder,
        options.optimizer,
        matrix_lr=options.matrix_lr,
        other_lr=options.lr,
        weight_decay=options.weight_decay,
    )
    micro = options.micro_windows
    return Trainer(objective, optimizer, ema=options.ema, ranks=ranks or ProcessGroup(), micro_windows=micro)


class Trainer:
    """Runs training steps: gradients(), then update(); the caller may check or reject the gradients in between."""

    def __init__(
        self,
        objective: Objective,
        optimizer: ParameterUpdates,
        *,
        ema: float,
        ranks: ProcessGroup,
        micro_windows: int | None,
    ) -> None:
        self.objective, self.optimizer, self.ranks = objective, optimizer, ranks
        self.decoder = objective.decoder
        self.average = WeightAverage(self.decoder, ema) if ema else None
        self.micro_windows = micro_windows
        """Rows per micro-batch; None means as many as fit."""
        self._may_shrink = micro_windows is None
        self._sums = GradientSums(ranks, list(self.decoder.parameters()))
        self._has_fit = False
        """Whether a step has fit into memory, so that the next one may send gradients before its end."""

    def gradients(self, batch: Batch, check_stop: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """(mean loss in nats per target, norm of its gradient) over the rows of all ranks; clips the gradients.

        check_stop: called before each micro-batch. If it raises, the state is as after the last complete step.
        """
        share, n_targets = self.ranks.share(batch), batch.n_targets
        overlaps = self._has_fit and self.ranks.size > 1 and not self.objective.loss_backend.is_handwritten
        accumulate = self._accumulate_overlapped if overlaps else self._accumulate
        while True:
            try:
                loss = accumulate(share, n_targets, check_stop)
                break
            except torch.OutOfMemoryError:
                self._halve_micro_batch(len(share.inputs_RN), may_shrink=not overlaps)
        self._has_fit = True
        self._sums.finish()
        self.ranks.start_sum([loss])()
        # The only synchronization with the device in a step: later work is launched while the update runs.
        nats, norm = torch.stack([loss.float(), self.optimizer.clip().float()]).tolist()
        return nats, norm

    def update(self, step: int, lr_factor: float) -> None:
        """Updates the weights and their average. step: number of steps before this one."""
        self.optimizer.step(lr_factor)
        if self.average:
            self.average.update(step + 1)

    def averaged(self) -> AbstractContextManager[None]:
        """Within the block, the decoder has the weights to evaluate and export."""
        return self.average.swapped_in() if self.average else nullcontext()

    def is_finite(self) -> bool:
        """Whether all weights are finite."""
        return all(bool(parameter.isfinite().all()) for parameter in self.decoder.parameters())

    def tensors(self) -> dict[str, Tensor]:
        """All state by name. Randomness (initial weights, order of the data) depends only on the seed."""
        weights = {f"decoder.{name}": tensor for name, tensor in self.decoder.state_dict().items()}
        average = self.average.tensors if self.average else {}
        return weights | self.optimizer.tensors() | {f"ema.{name}": tensor for name, tensor in average.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of tensors()."""
        self.decoder.load_state_dict(select_prefix("decoder", tensors))
        self.optimizer.load_tensors(dict(tensors))
        if self.average:
            copy_tensors(select_prefix("ema", tensors), self.average.tensors)

    def restore_micro_windows(self, saved: str) -> None:
        """Restores the micro-batch size of a snapshot, unless a flag sets it."""
        if self._may_shrink and saved != "auto":
            self.micro_windows = int(saved)

    @property
    def workers(self) -> int:
        """Maximum number of micro-batches computed in parallel."""
        return torch.get_num_threads() if self.objective.loss_backend.is_handwritten else 1

    def micro_batch_rows(self, share: Batch) -> int:
        """Rows per micro-batch."""
        if self.micro_windows is not None:
            return self.micro_windows
        if self.objective.device.type == "cuda":
            return len(share.inputs_RN)
        return max(2, _CPU_MICRO_BATCH_TOKENS // share.row_tokens)

    def _accumulate(self, share: Batch, n_targets: int, check_stop: Callable[[], None]) -> Tensor:
        """Accumulates the gradients of a share over its micro-batches. Returns its part of the mean loss."""
        self.decoder.zero_grad(set_to_none=True)
        parameters, main_thread = list(self.decoder.parameters()), threading.get_ident()

        def accumulate(parts: Sequence[Batch]) -> tuple[Tensor, list[Tensor]]:
            losses: list[Tensor] = []
            sums: list[Tensor] = []
            for part in parts:
                if threading.get_ident() == main_thread:  # it may raise, which must happen in the main thread
                    check_stop()
                loss = self.objective.loss_sum(part, 1 / n_targets)
                gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
                sums = [a.add_(b) for a, b in zip(sums, gradients, strict=True)] if sums else list(gradients)
                losses.append(loss.detach())
            return torch.stack(losses).sum(), sums

        results = map_shares(accumulate, share.split(self.micro_batch_rows(share)), self.workers)
        shares = list(zip(*(sums for _, sums in results), strict=True))
        gradients = run_each(_sum_in_place, shares) if len(results) > 1 else results[0][1]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return torch.stack([loss for loss, _ in results]).sum()

    def _accumulate_overlapped(self, share: Batch, n_targets: int, check_stop: Callable[[], None]) -> Tensor:
        """_accumulate() on one thread; sends gradients to the other ranks while backward computes the rest."""
        self.decoder.zero_grad(set_to_none=True)
        losses, parts = list[Tensor](), share.split(self.micro_batch_rows(share))
        for part in parts:
            check_stop()
            loss = self.objective.loss_sum(part, 1 / n_targets)
            with self._sums.overlapped() if part is parts[-1] else nullcontext():
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _halve_micro_batch(self, rows: int, *, may_shrink: bool) -> None:
        """Halves the micro-batch after the device ran out of memory."""
        tried = min(rows, self.micro_windows or rows)
        if tried == 1 or not self._may_shrink or not may_shrink:
            raise DataError(
                f"{tried} windows at once do not fit into the device's memory: lower --micro-windows or --context"
            ) from None
        self.decoder.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        self.micro_windows = (tried + 1) // 2


def _sum_in_place(tensors: Sequence[Tensor]) -> Tensor:
    return functools.reduce(Tensor.add_, tensors)


def select_prefix(owner: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors named owner.NAME, by NAME."""
    return {name.removeprefix(f"{owner}."): t for name, t in tensors.items() if name.startswith(f"{owner}.")}
