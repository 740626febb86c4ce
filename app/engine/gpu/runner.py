"""GPU runner: launches the step of a batch plan asynchronously, and collects its tokens later.

Steps that need the host between forward pass and sampling (a grammar's mask, prompt log-probabilities, parameters that
do not fit into a row) run synchronously in run(), with app/engine/execution/runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from app.common.fault_injection import fault
from app.common.types import BatchPlan, Chunk, Sequence, StepResult
from app.engine.execution.runner import MaskProvider, Runner, Sampler
from app.engine.execution.warmup_batches import dummies
from app.engine.gpu.graphs import Capture, DecodeGraphs
from app.engine.gpu.resident_batch import Download, StepInputs, Upload, lay_out, splits
from app.engine.gpu.step import StepProgram, pack_samples, unpack_samples
from model.config import ModelConfig

_MULTIPLE = 8
"""Tokens of a step, and rows of the LM head, are padded to a multiple of this number, if their number is not fixed."""


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was launched and not collected."""

    sampled: tuple[Sequence, ...]
    download: Download
    """Packed samples. Also copied if nothing is sampled: without waiting for the chunks of a prompt, the engine would
    launch a whole long prompt at once, and new requests would queue behind it."""


class DeviceRunner:
    """Runner of the asynchronous engine (app/engine/execution/engine.py), on one stream of one device."""

    def __init__(self, graphs: DecodeGraphs, *, sampler: Sampler, grammars: MaskProvider | None = None) -> None:
        self.graphs = graphs
        self._steps = graphs.steps
        self._resident = graphs.steps.resident
        self._host = Runner(HostCompute(graphs), sampler=sampler, grammars=grammars)

    def launchable(self, plan: BatchPlan) -> bool:
        """Whether the device can sample this step without the host."""
        return all(
            not chunk.scores
            and (self._resident.is_resident(chunk.sequence) or self._resident.can_sample(chunk.sequence.request))
            for chunk in plan.chunks
        )

    def run(self, plan: BatchPlan) -> StepResult:
        """Launches the step and waits for it. No other step may be in flight."""
        if self.launchable(plan):
            return self.collect(self.launch(plan))
        try:
            result = self._host.run(plan)
            Download(self._steps.rows_S).wait()  # a step that samples nothing has not synchronized yet
            return result
        finally:  # the device does not know the sampled tokens
            self._resident.release_rows(chunk.sequence for chunk in plan.chunks)

    @torch.inference_mode()
    def launch(self, plan: BatchPlan) -> InFlightStep:
        """Launches the step without waiting. If it raises, the next step uploads the rows of the plan again."""
        fault("engine.launch", plan)
        sampled = tuple(chunk.sequence for chunk in plan.chunks if chunk.samples)
        self._start(plan)
        return InFlightStep(sampled, Download(pack_samples(self._steps.out.first(len(sampled)))))

    def collect(self, flight: InFlightStep) -> StepResult:
        """Waits until the step has finished, and returns its samples."""
        samples = unpack_samples(flight.download.wait(), [s.request.params.logprobs for s in flight.sampled])
        return StepResult({s.request.id: sample for s, sample in zip(flight.sampled, samples, strict=True)})

    def warm_up(self, tokens_per_step: int) -> None:
        """Runs the shapes of real steps, so that no request pays for first calls.

        Short and long prompts, single tokens, and the end of a long sequence: attention has a variant for each. Also a
        prompt with log-probabilities: the LM head may use a different variant for all rows of a prompt.
        """
        max_rows, context = len(self._steps.rows_S), self._steps.resident.context
        short, long = (min(count, tokens_per_step, context) for count in (2, tokens_per_step))
        tails = [dummies(1, context, start=context - length) for length in (1, short)]
        scored = dummies(1, long, prompt_logprobs=0)
        for plan in (dummies(1, 1), dummies(max_rows, 1), dummies(1, short), dummies(1, long), *tails, scored):
            self.run(plan)
            self._resident.release_rows(chunk.sequence for chunk in plan.chunks)

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Captures decode steps, which later steps replay. No step may be in flight."""
        self.graphs.capture(capture)

    def _start(self, plan: BatchPlan) -> None:
        if not all(chunk.samples and chunk.stop == chunk.start + 1 for chunk in plan.chunks):
            self._steps.run_mixed(_upload_step(self.graphs, plan), _splits(plan))
            return
        staged = _StepUpload(self._steps, plan)
        count = self.graphs.bucket(len(plan.chunks))
        section = staged.upload.add([*staged.rows, *[self._resident.padding_row] * (count - len(plan.chunks))])
        numbers_X = staged.send()
        self._steps.rows_S[:count].copy_(numbers_X[section])
        self.graphs.run(count, _splits(plan))


class HostCompute:
    """A `StepExecutor` (app/engine/execution/runner.py): the forward alone, for steps that the host draws in."""

    def __init__(self, graphs: DecodeGraphs) -> None:
        self.config: ModelConfig = graphs.steps.decoder.config
        self._graphs = graphs

    def run(self, plan: BatchPlan) -> Items[Chunk]:
        """Runs the forward pass; rows are in the order of the plan."""
        self._graphs.steps.forward(_upload_step(self._graphs, plan), _splits(plan))
        return plan.chunks

    def logits(self, rows: Items[int]) -> Tensor:
        """Logits [rows, V], in the number format of the weights."""
        steps = self._graphs.steps
        size = len(steps.rows_S) if steps.tokens else _round_up(len(rows))
        padded = [*rows, *[rows[-1]] * (-len(rows) % size)]
        indices_X = torch.tensor(padded, device=steps.cache.device)
        logits_XV = torch.cat([steps.logits(indices_S) for indices_S in indices_X.split(size)])
        return logits_XV[: len(rows)]


class _StepUpload:
    """The single host-to-device copy of a step: updates of blocks and rows, and what is added to `upload`."""

    def __init__(self, steps: StepProgram, plan: BatchPlan) -> None:
        self.upload = Upload()
        self._steps = steps
        self.rows, updates = steps.resident.assign_rows(plan.chunks)
        self._updates = [self.upload.add(section) for section in updates.sections()]
        columns = (plan.clear, *([pair[side] for pair in plan.copies] for side in (0, 1)))
        self._blocks = [self.upload.add(column) for column in columns]

    def send(self) -> Tensor:
        """Sends all sections, and applies the updates. Returns the sections on the device."""
        numbers_X = self.upload.send(self._steps.cache.device)
        self._steps.prepare(*(numbers_X[section] for section in self._blocks))
        self._steps.resident.apply(numbers_X, self._updates)
        return numbers_X


def _upload_step(graphs: DecodeGraphs, plan: BatchPlan) -> StepInputs[Tensor]:
    """Uploads a step with prompts. Returns its inputs on the device."""
    steps, staged = graphs.steps, _StepUpload(graphs.steps, plan)
    n_samples = sum(chunk.samples for chunk in plan.chunks)
    layout = lay_out(
        plan.chunks,
        staged.rows,
        tile_tokens=steps.tile_tokens,
        padding_row=steps.resident.padding_row,
        tokens=steps.tokens or _round_up(sum(chunk.stop - chunk.start for chunk in plan.chunks)),
        n_samples=graphs.bucket(n_samples) if n_samples else 0,
    )
    sections = [staged.upload.add(section) for section in layout]
    numbers_X = staged.send()
    return StepInputs(*(numbers_X[section] for section in sections))


def _splits(plan: BatchPlan) -> int:
    """Number of attention splits of the longest sequence."""
    return splits(max(chunk.stop for chunk in plan.chunks))


def _round_up(count: int) -> int:
    return -(-count // _MULTIPLE) * _MULTIPLE
