"""Data-parallel training under torchrun: process group, all-reduce, barriers.

Every rank holds the whole model and builds the whole batch, a pure function of the step, but computes only its share of
the rows. One process with as many micro-batches has the same gradients, summed in another order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from model.train.data.batch import Batch
from model.train.data.sources import DataError

T = TypeVar("T")

_WAIT_LIMIT = timedelta(days=7)
"""Collectives time out after the backend's 10 or 30 minutes, but the main rank may read and tokenize for hours."""


class PeerExited(RuntimeError):
    """Another process of the run has exited, so this one cannot continue."""


class ProcessGroup:
    """This process and its rank among `size` processes."""

    def __init__(self, *, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        """store: shared by all ranks; not needed for a single process."""
        self.rank, self.size = rank, size
        self._store, self._n_calls = store, 0

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints output."""
        return self.rank == 0

    def require_divisible(self, rows: int) -> None:
        """Raises DataError unless the rows of a step are divisible among the processes."""
        if rows % self.size:
            raise DataError(f"--windows {rows} is not divisible by {self.size} processes; choose a multiple of them")

    def share(self, batch: Batch) -> Batch:
        """This rank's rows of a batch."""
        return batch if self.size == 1 else batch.split(len(batch.inputs_RN) // self.size)[self.rank]

    def main_process_first(self, work: Callable[[], T]) -> T:
        """Runs `work` on the main rank, then on the others, which find its files or fail with the same error."""
        store = self._store
        if store is None:
            return work()
        self._n_calls += 1
        key = f"main process done {self._n_calls}"
        if not self.is_main:
            self._collective(lambda: store.wait([key], _WAIT_LIMIT))
            return work()
        try:
            return work()
        finally:
            self._collective(lambda: store.set(key, "done"))

    def claims_message(self, message: str) -> bool:
        """Whether this rank prints a message that all ranks may print: the first one to ask does."""
        try:
            return self._store is None or self._store.add(f"printed {message}", 1) == 1
        except RuntimeError:  # the process that hosts the store has ended, and reported why
            return False

    def start_sum(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Begins a single all-reduce of all tensors; the result waits for it, and replaces each with its sum."""
        if self.size == 1:
            return lambda: None
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        work = self._collective(lambda: dist.all_reduce(flat, async_op=True))

        def finish() -> None:
            self._collective(work.wait)
            sums = flat.split([tensor.numel() for tensor in tensors])
            torch._foreach_copy_(list(tensors), [x.view_as(tensor) for x, tensor in zip(sums, tensors, strict=True)])

        return finish

    def all_reduce_max(self, seconds: float, signal_number: int) -> tuple[float, int]:
        """Maximum of each value over all ranks: clocks differ, and a signal may have reached only one rank."""
        if self.size == 1:
            return seconds, signal_number
        both = torch.tensor([seconds, signal_number], dtype=torch.float64)  # on the CPU: no device is waited for
        self._collective(lambda: dist.all_reduce(both, dist.ReduceOp.MAX))
        return float(both[0]), int(both[1])

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.all_reduce_max(0.0, 0)

    def destroy(self) -> None:
        """Destroys torch's process group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _collective(self, exchange: Callable[[], T]) -> T:
        try:
            return exchange()
        except RuntimeError as error:
            raise PeerExited(f"another process of this run has exited, so this one exits too ({error})") from None


_BUCKET_BYTES = 25 << 20
"""Gradients of an all-reduce: large enough for the bandwidth, and several to a model."""


class GradientSums:
    """Sums of gradients over all ranks, bucket by bucket: the last layers, which are there first, go first.

    Every rank sends the same buckets in the same order, whether backward computes the others meanwhile or not.
    """

    def __init__(self, ranks: ProcessGroup, parameters: Sequence[Tensor], bucket_bytes: int = _BUCKET_BYTES) -> None:
        self._ranks = ranks
        self._buckets: list[list[Tensor]] = [[]]
        for parameter in reversed(parameters):
            if sum(p.nbytes for p in self._buckets[-1]) >= bucket_bytes:
                self._buckets.append([])
            self._buckets[-1].append(parameter)
        self._missing: list[set[int]] = []
        self._finish: list[Callable[[], None]] = []

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Sends what the last backward pass of a step, in this block, has completed."""
        self._missing = [{id(parameter) for parameter in bucket} for bucket in self._buckets]
        hooks = [p.register_post_accumulate_grad_hook(self._add) for bucket in self._buckets for p in bucket]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self) -> None:
        """Sends the remaining buckets, and replaces all gradients with their sums."""
        while len(self._finish) < len(self._buckets):
            self._send()
        for finish in self._finish:
            finish()
        self._finish.clear()

    def _add(self, parameter: Tensor) -> None:
        for missing in self._missing:
            missing.discard(id(parameter))
        while len(self._finish) < len(self._buckets) and not self._missing[len(self._finish)]:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[len(self._finish)]
        for parameter in bucket:
            if parameter.grad is None:  # the step does not use it
                parameter.grad = torch.zeros_like(parameter)
        self._finish.append(self._ranks.start_sum([p.grad for p in bucket if p.grad is not None]))


def join(environment: Mapping[str, str] = os.environ, *, device: str) -> ProcessGroup:
    """Joins torchrun's process group, or creates one with a single process. device: value of --device."""
    size = int(environment.get("WORLD_SIZE", "1"))
    if size == 1:
        return ProcessGroup()
    on_cuda = device != "cpu" and torch.cuda.is_available()
    if on_cuda:
        local, n_devices = int(environment.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= n_devices:
            raise DataError(f"process {local + 1} finds {n_devices} GPUs here; start as many, or use --device cpu")
        torch.cuda.set_device(local)
    store, rank, size = next(rendezvous("env://"))
    # By the device of the tensors: gradients of GPUs by NCCL, clocks and signals by gloo.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo", store=store, rank=rank, world_size=size)
    return ProcessGroup(rank=rank, size=size, store=store)
