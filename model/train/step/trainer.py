"""One training step with all of its state: decoder, optimizer, averaged weights, best weights."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from model.nn.transformer import Decoder
from model.train.common.thread_pool import in_shares
from model.train.data.batch import Batch
from model.train.data.sources import DataError
from model.train.step.distributed import ProcessGroup
from model.train.step.objective import Objective
from model.train.step.optimizer import ParameterUpdates


class WeightAverage:
    """The exponential moving average of a decoder's parameters, in float32: one more copy of them.

    The first steps count for more than `decay` would let them, else the average would remember the random start:
    over step s it is at most (1 + s) / (10 + s). Off by default: on a linear schedule it gains nothing (held-out
    bits per byte of nano after 300 steps of 1,024 tokens: 1.874 without, 1.877 with any decay from 0.9 to 0.995).
    """

    def __init__(self, decoder: Decoder, decay: float) -> None:
        self.decay = decay
        self._live = dict(decoder.named_parameters())
        self._averaged = {name: p.detach().float().clone() for name, p in self._live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the weights as they are after `step` steps."""
        weight = 1.0 - min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self._averaged.values()), [p.detach().float() for p in self._live.values()], weight)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block, the decoder has the averaged weights."""
        kept = {name: p.detach().clone() for name, p in self._live.items()}
        _copy(self._averaged, self._live)
        try:
            yield
        finally:
            _copy(kept, self._live)

    def settle(self) -> None:
        """Leaves the averaged weights in the decoder: nothing is learnt any more."""
        _copy(self._averaged, self._live)

    def tensors(self) -> dict[str, Tensor]:
        """All state: parameter -> its average."""
        return self._averaged

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of tensors()."""
        _copy(tensors, self._averaged)


class BestWeights:
    """A copy of the best weights measured, in the machine's memory, and what they were."""

    def __init__(self) -> None:
        self.step = 0
        self.bits = math.inf
        self._weights: dict[str, Tensor] = {}

    def consider(self, decoder: Decoder, step: int, bits: float) -> None:
        """Keeps the decoder's weights where they are the best. Of equal ones the first stays."""
        if bits < self.bits:
            self.step, self.bits = step, bits
            # One copy, taken from the device where they are: .cpu() alone would share a CPU's own weights.
            self._weights = {name: p.detach().to("cpu", copy=True) for name, p in decoder.named_parameters()}

    @torch.no_grad()
    def settle(self, decoder: Decoder) -> None:
        """Leaves the best weights in the decoder: nothing is learnt any more."""
        for name, parameter in decoder.named_parameters():
            parameter.copy_(self._weights[name])

    def tensors(self) -> dict[str, Tensor]:
        """The weights by name; none before the first measurement."""
        return self._weights

    def load(self, tensors: Mapping[str, Tensor], *, step: int, bits: float) -> None:
        """Puts back what a snapshot kept."""
        self.step, self.bits, self._weights = step, bits, dict(tensors)


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])


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
