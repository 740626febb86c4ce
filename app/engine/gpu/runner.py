"""GPU runner: launches the step of a batch plan without waiting, and collects its tokens later.

Steps that need the host between forward pass and sampling (a grammar's mask, scores of a prompt, parameters that do not
fit into a row) are computed in run(), with app/engine/execution/runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from app.common.fault_injection import fault
from app.common.types import BatchPlan, Chunk, Sequence
from app.engine.execution.runner import MaskProvider, Runner, Sampler
from app.engine.execution.warmup_batches import dummies
from app.engine.gpu.graphs import Capture, DecodeGraphs
from app.engine.gpu.resident_batch import Download, Layout, Upload, lay_out, splits
from app.engine.gpu.step import StepInputs, StepProgram, packed, unpacked
from app.engine.sampling.sampler_io import StepResult
from model.config import ModelConfig

_ROUND = 8
"""To a multiple of which tokens of a step are padded."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """Which shapes steps have."""

    tile_tokens: int
    """Query tokens of a tile of the attention in steps with prompts."""
    tokens: int = 0
    """Of every step, where a row's bits must not depend on its neighbours; 0: as many as there are."""
    head_rows: int = 0
    """That go through the head at once, likewise."""

    def padded(self, count: int) -> int:
        """Tokens of a step that has `count`."""
        return self.tokens or -(-count // _ROUND) * _ROUND


@dataclass(frozen=True, slots=True)
class DeviceFlight:
    """A step that is under way."""

    drawing: tuple[Sequence, ...]
    numbers: Download
    """Also where nothing is sampled: without waiting for the chunks of a prompt, all of a long prompt would be launched
    at once, and new requests would queue behind it."""


class DeviceRunner:
    """Runs ahead (app/engine/execution/engine.py), on one stream of one device."""

    def __init__(
        self, graphs: DecodeGraphs, shapes: Shapes, *, sampler: Sampler, guides: MaskProvider | None = None
    ) -> None:
        self.graphs = graphs
        self._steps = graphs.steps
        self._rows = graphs.steps.rows
        self._shapes = shapes
        self._host = Runner(HostCompute(graphs, shapes), sampler=sampler, grammars=guides)

    def launchable(self, plan: BatchPlan) -> bool:
        """Whether the device can draw by itself."""
        return all(
            not chunk.scores and (self._rows.knows(chunk.sequence) or self._rows.table.fits(chunk.sequence.request))
            for chunk in plan.chunks
        )

    def run(self, plan: BatchPlan) -> StepResult:
        """Launched and waited for. Nothing may be under way."""
        if self.launchable(plan):
            return self.collect(self.launch(plan))
        try:
            result = self._host.run(plan)
            Download(self._steps.rows_S).wait()  # where nothing was sampled, nothing has synchronized yet
            return result
        finally:  # the device does not have the sampled tokens
            self._rows.forget(chunk.sequence for chunk in plan.chunks)

    @torch.inference_mode()
    def launch(self, plan: BatchPlan) -> DeviceFlight:
        """Never waits. If it raises, the plan's rows are uploaded again: their next chunk does not follow the last."""
        fault("engine.launch", plan)
        drawing = tuple(chunk.sequence for chunk in plan.chunks if chunk.samples)
        self._start(plan)
        return DeviceFlight(drawing, Download(packed(self._steps.out.first(len(drawing)))))

    def collect(self, flight: DeviceFlight) -> StepResult:
        """Waits for the step to be through."""
        drawn = unpacked(flight.numbers.wait(), [s.request.params.logprobs for s in flight.drawing])
        return StepResult({s.request.id: one for s, one in zip(flight.drawing, drawn, strict=True)})

    def warm_up(self, tokens_per_step: int) -> None:
        """Runs the shapes that real steps have, so that no request pays for first calls.

        Prompts in few tokens and in many, single tokens, and the end of a long text: attention has a variant for each.
        And one that is scored: the head of as many rows as a prompt has may be another variant than that of as many as
        draw.
        """
        most, context = len(self._steps.rows_S), self._steps.rows.context
        few, many = (min(count, tokens_per_step, context) for count in (2, tokens_per_step))
        tails = [dummies(1, context, start=context - length) for length in (1, few)]
        scored = dummies(1, many, prompt_logprobs=0)
        for plan in (dummies(1, 1), dummies(most, 1), dummies(1, few), dummies(1, many), *tails, scored):
            self.run(plan)
            self._rows.forget(chunk.sequence for chunk in plan.chunks)

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Decode steps, to be replayed from now on. Nothing may be under way."""
        self.graphs.capture(capture)

    def _start(self, plan: BatchPlan) -> None:
        if not all(chunk.samples and chunk.stop == chunk.start + 1 for chunk in plan.chunks):
            told, longest = _sent(self.graphs, self._shapes, plan)
            self._steps.mixed(told, tile_tokens=self._shapes.tile_tokens, splits=splits(longest))
            return
        rows, sending = _Sending.of(self._steps, plan)
        count = self.graphs.bucket(len(rows))
        place = sending.upload.add([*rows, *[self._rows.padding_row] * (count - len(rows))])
        numbers_X = sending.send()
        self._steps.rows_S[:count].copy_(numbers_X[place])
        self.graphs.run(count, splits(max(chunk.stop for chunk in plan.chunks)))


class HostCompute:
    """A `StepExecutor` (app/engine/execution/runner.py): the forward alone, for steps that the host draws in."""

    def __init__(self, graphs: DecodeGraphs, shapes: Shapes) -> None:
        self.config: ModelConfig = graphs.steps.decoder.config
        self._graphs = graphs
        self._shapes = shapes

    def run(self, plan: BatchPlan) -> Items[Chunk]:
        """Rows stand in the order of the plan."""
        told, longest = _sent(self._graphs, self._shapes, plan)
        self._graphs.steps.forward(told, tile_tokens=self._shapes.tile_tokens, splits=splits(longest))
        return plan.chunks

    def logits(self, rows: Items[int]) -> Tensor:
        """Logits [rows, V], in the number format of the weights."""
        steps, size = self._graphs.steps, self._shapes.head_rows or -(-len(rows) // _ROUND) * _ROUND
        padded = [*rows, *[rows[-1]] * (-len(rows) % size)]
        places_X = torch.tensor(padded, device=steps.cache.device)
        logits_XV = torch.cat([steps.logits(places_S) for places_S in places_X.split(size)])
        return logits_XV[: len(rows)]


class _Sending:
    """The one upload of a step."""

    def __init__(self, steps: StepProgram, plan: BatchPlan, sections: list[slice], upload: Upload) -> None:
        self.upload = upload
        self._steps = steps
        self._sections = sections
        columns = (plan.clear, *([pair[side] for pair in plan.copies] for side in (0, 1)))
        self._blocks = [upload.add(column) for column in columns]

    @classmethod
    def of(cls, steps: StepProgram, plan: BatchPlan) -> tuple[list[int], _Sending]:
        """The rows of the plan's chunks, and what to upload for them."""
        upload = Upload()
        rows, changes = steps.rows.enter(plan.chunks)
        return rows, cls(steps, plan, steps.rows.tell(changes, upload), upload)

    def send(self) -> Tensor:
        """All sections on the device, where blocks and rows have heard what is theirs."""
        numbers_X = self.upload.send(self._steps.cache.device)
        self._steps.prepare(*(numbers_X[place] for place in self._blocks))
        self._steps.rows.apply(numbers_X, self._sections)
        return numbers_X


def _sent(graphs: DecodeGraphs, shapes: Shapes, plan: BatchPlan) -> tuple[StepInputs, int]:
    """A step with prompts in it, on the device, and its longest sequence."""
    rows, sending = _Sending.of(graphs.steps, plan)
    n_draws = sum(chunk.samples for chunk in plan.chunks)
    layout: Layout = lay_out(
        plan.chunks,
        rows,
        tile_tokens=shapes.tile_tokens,
        padding_row=graphs.steps.rows.padding_row,
        tokens=shapes.padded(sum(chunk.stop - chunk.start for chunk in plan.chunks)),
        draws=graphs.bucket(n_draws) if n_draws else 0,
    )
    places = [sending.upload.add(section) for section in layout.sections()]
    numbers_X = sending.send()
    return StepInputs(*(numbers_X[place] for place in places)), max(chunk.stop for chunk in plan.chunks)
