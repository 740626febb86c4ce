"""Captures operations on tensors with fixed addresses as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch

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
