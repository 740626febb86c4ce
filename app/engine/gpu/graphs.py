"""CUDA graphs of the parts of a step: of decode steps by rows, of steps with up to 512 tokens of prompts by tokens.

A small model's step is bound by kernel launches, so a step is two graphs: the forward pass, and the draw with the LM
head. What is not captured runs operation by operation. Forward passes are captured twice: for sequences of one split of
attention, which no layer has to merge, and for all others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from app.engine.gpu.cuda_capture import Capture
from app.engine.gpu.executor import DeviceExecutor
from app.engine.gpu.step_inputs import StepInputs, clear
from app.engine.gpu.step_sizes import bucket, round_up


class StepGraphs:
    """The parts of steps, captured by size: replayed if they were, else run operation by operation."""

    def __init__(
        self, executor: DeviceExecutor, *, rows: tuple[int, ...], tokens: tuple[int, ...], max_splits: int
    ) -> None:
        """rows: sizes of decode steps and draws. tokens: sizes of the steps with prompts that are captured."""
        self.executor = executor
        self._rows = rows
        self._tokens = tokens
        self._levels = (1, max_splits) if max_splits > 1 else (1,)
        n_inputs = 3 * tokens[-1] + 4 * self._most_tiles(tokens[-1]) if tokens else 0
        self._inputs_X = torch.empty(n_inputs, dtype=torch.int32, device=executor.device)
        """StepInputs of the captured steps with prompts."""
        self.replays: dict[tuple[str, int, int], Callable[[], None]] = {}
        """Captured parts by kind, size and splits."""

    @property
    def count(self) -> int:
        """Number of graphs that capture() captures."""
        return (len(self._tokens) + len(self._rows)) * len(self._levels) + len(self._rows)

    @property
    def largest(self) -> tuple[tuple[int, int], ...]:
        """Number of sequences, and tokens of each, of the largest steps that are captured."""
        max_rows, context = self.executor.max_rows, self.executor.resident.context
        prompts = [(max(1, min(n // context, max_rows)), min(n, context)) for n in self._tokens[-1:]]
        return ((max_rows, 1), *prompts)

    def capture(self, capture: Capture) -> None:
        """Captures all parts on padding rows, the largest first. To be called once."""
        assert not self.replays, "replacing a graph would free the workspace that the others use"
        self.executor.clear_drawn()
        for size in reversed(self._tokens):
            inputs = self._static_inputs(size)
            clear(inputs, self.executor.resident.padding_row)
            for level in reversed(self._levels):
                self.replays["prefill", size, level] = capture(partial(self.executor.prefill, inputs, level))
        for size in reversed(self._rows):
            self.replays["draw", size, 1] = capture(partial(self.executor.draw, size))
            for level in reversed(self._levels):
                self.replays["decode", size, level] = capture(partial(self.executor.decode, size, level))

    def rows(self, count: int) -> int:
        """Number of rows that a draw or a decode step of `count` rows is padded to."""
        return bucket(count, self._rows)

    def tokens(self, count: int) -> int:
        """Number of tokens that a step with prompts is padded to."""
        if self.executor.tokens:
            return self.executor.tokens
        is_small = self._tokens and count <= self._tokens[-1]
        return bucket(count, self._tokens) if is_small else round_up(count)

    def tiles(self, count: int, n_tokens: int) -> int:
        """Number of tiles that a step with prompts is padded to."""
        return self._most_tiles(n_tokens) if self._is_captured(n_tokens) else round_up(count)

    def decode(self, count: int, splits: int) -> None:
        """Forward pass of the last token of `count` rows (a bucket)."""
        self._run("decode", count, splits, partial(self.executor.decode, count, splits))

    def prefill(self, inputs_X: Tensor, n_tokens: int, n_tiles: int, splits: int) -> None:
        """Forward pass of a step with prompts. inputs_X: its StepInputs."""
        if self._is_captured(n_tokens):
            self._inputs_X[: len(inputs_X)].copy_(inputs_X)
        inputs = StepInputs.of(inputs_X, n_tokens, n_tiles)
        self._run("prefill", n_tokens, splits, partial(self.executor.prefill, inputs, splits))

    def draw(self, count: int) -> None:
        """Samples for the first `count` tokens (a bucket) of the last forward pass."""
        self._run("draw", count, 1, partial(self.executor.draw, count))

    def _run(self, kind: str, size: int, splits: int, part: Callable[[], None]) -> None:
        self.replays.get((kind, size, bucket(splits, self._levels)), part)()

    def _is_captured(self, n_tokens: int) -> bool:
        return ("prefill", n_tokens, 1) in self.replays

    def _static_inputs(self, n_tokens: int) -> StepInputs[Tensor]:
        n_tiles = self._most_tiles(n_tokens)
        return StepInputs.of(self._inputs_X[: 3 * n_tokens + 4 * n_tiles], n_tokens, n_tiles)

    def _most_tiles(self, n_tokens: int) -> int:
        """Most tiles of a step: one for each row that samples, and for each prompt one more than it can fill."""
        return round_up(min(n_tokens, 2 * self.executor.max_rows + n_tokens // self.executor.tile_tokens))
