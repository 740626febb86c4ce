"""CUDA graphs of decode steps, by number of rows and by length of the longest sequence.

A small model's step is bound by kernel launches, so the whole step, with LM head and sampling, is one graph. Without a
captured graph the same step runs operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from app.engine.gpu.resident_batch import bucket
from app.engine.gpu.step import StepProgram

_LEVELS = (1, 16)
"""Splits for which steps are captured, beside the most that there can be. Where all sequences have one, nothing is to
be merged, which is a kernel less in each layer; programs for more than 8,192 positions would mostly end at once."""


class Capture(Protocol):
    """Records what `work` does to tensors that stay where they are."""

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Does it again, on what stands in them then."""
        ...


class CudaCapture:
    """CUDA graphs that share one pool of memory: capture the largest first, and never run two at once.

    And one stream: cuBLAS keeps a workspace (tens of MiB) for each stream that it was ever called on, and torch would
    hand out another stream of its 32 for every capture. So none of them may go before the last: torch gives back the
    workspace of its stream with a graph, even if other graphs were captured there (pytorch issue 193402).
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.beside(work)  # kernels are compiled and libraries make their workspaces, which a capture must not
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return graph.replay

    def beside(self, work: Callable[[], None]) -> None:
        """Done on the stream of captures, behind all that came before and before all that comes behind."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)


class DecodeGraphs:
    """Decode steps of up to the last of `buckets` rows."""

    def __init__(self, steps: StepProgram, *, buckets: tuple[int, ...], max_splits: int) -> None:
        self.steps = steps
        self.buckets = buckets
        self._levels = (*(level for level in _LEVELS if level < max_splits), max_splits)
        self.replays: dict[tuple[int, int], Callable[[], None]] = {}
        """What was captured, by rows and splits; what is not here runs operation by operation."""

    @property
    def number(self) -> int:
        """How many there are to capture."""
        return len(self.buckets) * len(self._levels)

    def capture(self, capture: Capture) -> None:
        """Captures all graphs, once, on the padding row."""
        assert not self.replays, "with the first to be replaced those captured before it would lose their workspace"
        self.steps.rows_S.fill_(self.steps.rows.padding_row)
        for count in reversed(self.buckets):
            for splits in reversed(self._levels):
                self.replays[count, splits] = capture(partial(self.steps.decode, count, splits))

    def bucket(self, count: int) -> int:
        """Rows that a step of `count` is padded to."""
        return bucket(count, self.buckets)

    def run(self, count: int, splits: int) -> None:
        """The step of one of the buckets, whose rows stand in steps.rows_S."""
        level = bucket(splits, self._levels)
        replay = self.replays.get((count, level))
        if replay:
            replay()
        else:
            self.steps.decode(count, level)
