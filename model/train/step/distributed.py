"""Distributed training under torchrun: ranks, sums over all ranks, and agreement among them.

Every rank holds the whole model and makes the whole batch, which is a pure function of the step; it computes its share
of the rows. The sums of gradients are then the sums that one process with as many micro-batches has, in another order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from model.train.data.batch import Batch
from model.train.data.sources import DataError

T = TypeVar("T")

_A_TURN = timedelta(days=7)
"""An exchange of numbers ends after the backend's 10 or 30 minutes; the first rank may read and tokenise for hours."""


class Store(Protocol):
    """What all ranks write to and read: torch.distributed.Store."""

    def set(self, key: str, value: str, /) -> None:
        """Writes."""

    def wait(self, keys: list[str], limit: timedelta, /) -> None:
        """Until all keys are written. Raises RuntimeError after `limit`, or where the store is gone."""

    def add(self, key: str, value: int, /) -> int:
        """The sum of all that was added, this too."""
        ...


class LeftAlone(RuntimeError):
    """Another process of the run has ended, so this one cannot go on."""


class ProcessGroup:
    """One process among `size`."""

    def __init__(
        self, *, number: int = 0, size: int = 1, device: torch.device | None = None, store: Store | None = None
    ) -> None:
        """store: what all ranks can write to and read; one that is alone needs none."""
        self.number, self.size = number, size
        self._store, self._turns = store, 0
        self.device = device or torch.device("cpu")
        """Where sums over all ranks are taken."""

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.number == 0

    def must_share(self, rows: int) -> None:
        """Raises DataError where so many rows a step cannot be shared out evenly."""
        if rows % self.size:
            raise DataError(f"--windows {rows} cannot be shared by {self.size} processes; give a multiple of them")

    def share(self, batch: Batch) -> Batch:
        """This rank's rows of a batch."""
        return batch if self.size == 1 else batch.split(len(batch.inputs_RN) // self.size)[self.number]

    def in_turn(self, work: Callable[[], T]) -> T:
        """First the first rank does `work`, then the others, who find the files that it left, or the same fault."""
        store = self._store
        if store is None:
            return work()
        self._turns += 1
        turn = f"turn {self._turns}"
        if not self.is_first:
            self._together(lambda: store.wait([turn], _A_TURN))
            return work()
        try:
            return work()
        finally:
            self._together(lambda: store.set(turn, "over"))

    def tells(self, words: str) -> bool:
        """Whether this rank prints a message that all ranks may have to print: the first one to ask does."""
        try:
            return self._store is None or self._store.add(f"told {words}", 1) == 1
        except RuntimeError:  # the process that hosts the store has ended, and reported why
            return False

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes its sum over all ranks: one message for all of them."""
        if self.size > 1:
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            self._together(lambda: dist.all_reduce(flat))
            for tensor, sums in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(sums.view_as(tensor))

    def agree(self, seconds: float, signal_number: int) -> tuple[float, int]:
        """The largest of each over all ranks: their clocks differ, and a signal may have reached but one."""
        if self.size == 1:
            return seconds, signal_number
        both = torch.tensor([seconds, signal_number], dtype=torch.float64, device=self.device)
        self._together(lambda: dist.all_reduce(both, dist.ReduceOp.MAX))
        return float(both[0]), int(both[1])

    def wait(self) -> None:
        """Until all ranks have come here."""
        self.agree(0.0, 0)  # and not a sum alone: that is only begun when a GPU is asked for it, read it is over

    def leave(self) -> None:
        """The end of working together."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _together(self, exchange: Callable[[], object]) -> None:
        try:
            exchange()
        except RuntimeError as error:
            raise LeftAlone(f"another process of this run has ended, so this one ends too ({error})") from None


def join(environment: Mapping[str, str] = os.environ, *, device: str) -> ProcessGroup:
    """Joins the process group of torchrun, or makes one of a single rank without it. device: the flag's value."""
    size = int(environment.get("WORLD_SIZE", "1"))
    if size == 1:
        return ProcessGroup()
    on_cuda = device != "cpu" and torch.cuda.is_available()
    if on_cuda:
        local, n_devices = int(environment.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= n_devices:
            raise DataError(f"process {local + 1} finds {n_devices} GPUs here; start as many, or give --device cpu")
        torch.cuda.set_device(local)
    store, number, size = next(rendezvous("env://"))
    dist.init_process_group("nccl" if on_cuda else "gloo", store=store, rank=number, world_size=size)
    return ProcessGroup(number=number, size=size, device=torch.device("cuda" if on_cuda else "cpu"), store=store)
