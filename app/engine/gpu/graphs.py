"""CUDA graphs of decode steps, by number of rows and by length of the longest sequence.

A small model's step is bound by kernel launches, so the whole step, with LM head and sampling, is one graph. Without a
captured graph the same step runs operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from app.engine.gpu.resident_batch import bucket
from app.engine.gpu.step import StepProgram

_SPLIT_LEVELS = (1, 16)
"""Numbers of splits that steps are captured for, in addition to the maximum. With one split, no layer needs the merge
kernel; programs for more than 8,192 positions (16 splits) would mostly exit at once."""


Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures operations on tensors with fixed addresses; returns a function that replays them on the current contents."""


class CudaCapture:
    """CUDA graphs that share one memory pool: capture the largest first, and never run two at once.

    They also share one stream: cuBLAS keeps a workspace (tens of MiB) for each stream that it was ever called on, and
    torch would use another one of its 32 streams for every capture. So no graph may be freed before the last one: torch
    frees the workspace of the stream with a graph, even if other graphs were captured there (pytorch issue 193402).
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.run_on_stream(work)  # compiles kernels and allocates library workspaces, which a capture must not do
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return graph.replay

    def run_on_stream(self, work: Callable[[], object]) -> None:
        """Runs `work` on the capture stream, ordered after earlier and before later work of the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)


class DecodeGraphs:
    """Captured decode steps of up to buckets[-1] rows."""

    def __init__(self, steps: StepProgram, *, buckets: tuple[int, ...], max_splits: int) -> None:
        self.steps = steps
        self.buckets = buckets
        self._levels = (*(level for level in _SPLIT_LEVELS if level < max_splits), max_splits)
        self.replays: dict[tuple[int, int], Callable[[], None]] = {}
        """Captured steps by (rows, splits); other steps run operation by operation."""

    @property
    def count(self) -> int:
        """Number of graphs that capture() captures."""
        return len(self.buckets) * len(self._levels)

    def capture(self, capture: Capture) -> None:
        """Captures all graphs on the padding row. To be called once."""
        assert not self.replays, "replacing a graph would free the workspace that the others use"
        self.steps.rows_S.fill_(self.steps.resident.padding_row)
        for count in reversed(self.buckets):
            for splits in reversed(self._levels):
                self.replays[count, splits] = capture(partial(self.steps.decode, count, splits))

    def bucket(self, count: int) -> int:
        """Number of rows that a step of `count` rows is padded to."""
        return bucket(count, self.buckets)

    def run(self, count: int, splits: int) -> None:
        """Runs the step of `count` rows (a bucket), which are in steps.rows_S."""
        level = bucket(splits, self._levels)
        replay = self.replays.get((count, level))
        if replay:
            replay()
        else:
            self.steps.decode(count, level)
