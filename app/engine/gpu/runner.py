"""GPU runner: launches the step of a batch plan asynchronously, and collects its tokens later.

Every token is sampled, and every prompt scored, on the device. The host only adds the masks of grammars, which it
computes during the forward pass of the step; they depend on the tokens of the step before, so such a step is not
launched ahead.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from app.common.fault_injection import fault
from app.common.types import Request, TokenScore
from app.engine.execution.runner import MaskProvider, SampledRows
from app.engine.execution.warmup_batches import dummies
from app.engine.gpu.cuda_capture import Capture
from app.engine.gpu.executor import SCORED_ROWS, DeviceExecutor
from app.engine.gpu.graphs import StepGraphs
from app.engine.gpu.kernels.sample_out import SampleOut, samples_of
from app.engine.gpu.step_inputs import lay_out, pad
from app.engine.gpu.step_sizes import splits
from app.engine.gpu.transfers import Download, Upload
from app.engine.sampling.parameters import token_mask
from app.engine.sampling.sampled_token import SampledToken
from app.engine.scheduling.batch_plan import BatchPlan, Sequence, StepResult


class InFlightStep(NamedTuple):
    """A step that was launched and not collected."""

    sampling: SampledRows
    """In the order of the rows of the draw."""
    scoring: list[tuple[Request, int]]
    """Requests with scored prompts, and how many of their tokens this step scores."""
    decided: dict[str, SampledToken]
    """Results of guided rows that replace the samples."""
    n_drawn: int
    """Rows of the draw, with padding."""
    download: Download
    """Numbers of the draw, then of the scores. Also copied if nothing is sampled: without waiting for the chunks of a
    prompt, the engine would launch a whole long prompt at once, and new requests would queue behind it."""


class DeviceRunner:
    """Runner of the asynchronous engine (app/engine/execution/engine.py), on one stream of one device."""

    def __init__(self, graphs: StepGraphs, *, grammars: MaskProvider | None = None) -> None:
        """Without `grammars` there must be no guided request."""
        self.graphs = graphs
        self._executor = graphs.executor
        self._resident = graphs.executor.resident
        self._grammars = grammars
        self._sampled_rows = SampledRows([])

    def launchable(self, plan: BatchPlan) -> bool:
        """Whether the step needs no mask, which depends on the tokens of the step before."""
        return not any(chunk.samples for chunk in plan.chunks if chunk.sequence.request.grammar)

    def run(self, plan: BatchPlan) -> StepResult:
        """Launches the step and waits for it. No other step may be in flight."""
        return self.collect(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: BatchPlan) -> InFlightStep:
        """Launches the step without waiting. If it raises, the next step uploads the rows of the plan again."""
        fault("engine.launch", plan)
        sequences = [chunk.sequence for chunk in plan.chunks]
        stops = [chunk.stop for chunk in plan.chunks]
        samples = [stop >= len(sequence.tokens) for sequence, stop in zip(sequences, stops, strict=True)]
        sampling = sequences if all(samples) else [*compress(sequences, samples)]
        if sampling != self._sampled_rows.sequences:  # else the same sequences sample again
            self._sampled_rows = SampledRows(sampling)
        rows = self._sampled_rows
        n_drawn = self.graphs.rows(max(1, len(sampling)))
        scores_X = self._forward(plan, stops, samples, n_drawn)
        decided = self._load_masks(sampling) if rows.is_guided else {}
        if sampling:
            self.graphs.draw(n_drawn)
        drawn_X = self._executor.out.first(n_drawn).numbers_X
        if scores_X is None:
            return InFlightStep(rows, [], decided, n_drawn, Download(drawn_X))
        scoring = [(chunk.sequence.request, len(chunk.scores)) for chunk in plan.chunks if chunk.scores]
        download = Download(torch.cat((drawn_X, scores_X)))
        return InFlightStep(rows, scoring, decided, n_drawn, download)

    def collect(self, flight: InFlightStep) -> StepResult:
        """Waits until the step has finished, and returns its results."""
        numbers_X, scores = flight.download.wait(), dict[str, tuple[TokenScore, ...] | None]()
        if flight.scoring:
            n_drawn = len(self._executor.out.first(flight.n_drawn).numbers_X)
            numbers_X, scores = numbers_X[:n_drawn], _scores(numbers_X[n_drawn:], flight.scoring)
        rows = flight.sampling
        samples = samples_of(numbers_X, flight.n_drawn, rows.counts)
        if not (rows.is_guided and self._grammars):
            return StepResult(dict(zip(rows.ids, zip(samples), strict=True)), scores)
        is_open = [request_id not in flight.decided for request_id in rows.ids]
        sequences, samples = [*compress(rows.sequences, is_open)], [*compress(samples, is_open)]
        samples = self._grammars.accept_tokens(sequences, samples)
        sampled = flight.decided | {s.request.id: sample for s, sample in zip(sequences, samples, strict=True)}
        return StepResult({request_id: (sample,) for request_id, sample in sampled.items()}, scores)

    def warm_up(self, tokens_per_step: int) -> None:
        """Runs the shapes of real steps, so that no request pays for first calls.

        Short and long prompts, single tokens, and the end of a long sequence: attention has a variant for each. Also a
        prompt with log-probabilities: the LM head may use a different variant for the rows of a prompt.
        """
        max_rows, context = self._executor.max_rows, self._resident.context
        short, long = (min(count, tokens_per_step, context) for count in (2, tokens_per_step))
        tails = [dummies(1, context, start=context - length) for length in (1, short)]
        scored = dummies(1, long, prompt_logprobs=0)
        for plan in (dummies(1, 1), dummies(max_rows, 1), dummies(1, short), dummies(1, long), *tails, scored):
            self.run(plan)
            self._resident.release_rows(chunk.sequence for chunk in plan.chunks)

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Captures parts of steps, which later steps replay. No step may be in flight."""
        self.graphs.capture(capture)

    def _forward(self, plan: BatchPlan, stops: list[int], samples: list[bool], n_drawn: int) -> Tensor | None:
        """Uploads the step and launches its forward pass. Returns the log-probabilities of its prompts, if any."""
        staged, graphs = _StepUpload(self._executor, plan, stops, samples, n_drawn), self.graphs
        n_splits = splits(max(stops))
        if all(samples) and sum(stops) - sum([chunk.start for chunk in plan.chunks]) == len(samples):
            staged.send()
            graphs.decode(n_drawn, n_splits)
            return None
        layout = lay_out(plan.chunks, staged.rows, tile_tokens=self._executor.tile_tokens)
        n_tokens = graphs.tokens(len(layout.inputs.rows_T))
        n_tiles = graphs.tiles(len(layout.inputs.tile_row_X), n_tokens)
        pad(layout.inputs, self._resident.padding_row, n_tokens, n_tiles)
        inputs = [staged.upload.add(section) for section in layout.inputs]
        n_scored = -(-len(layout.scored_X) // SCORED_ROWS) * SCORED_ROWS
        scored = [staged.upload.add(section, n_scored) for section in (layout.scored_X, layout.next_tokens_X)]
        numbers_X = staged.send()
        graphs.prefill(numbers_X[inputs[0].start : inputs[-1].stop], n_tokens, n_tiles, n_splits)
        return self._executor.score(*(numbers_X[section] for section in scored)) if n_scored else None

    def _load_masks(self, sampling: Items[Sequence]) -> dict[str, SampledToken]:
        """Uploads the masks of guided rows. Returns the results of rows that must not sample."""
        assert self._grammars
        decided: dict[str, SampledToken] = {}
        vocab_size, upload, rows, masks = self._resident.table.vocab_size, Upload(), list[int](), array("i")
        for sequence, allowed in zip(sampling, self._grammars.allowed(sampling), strict=True):
            if isinstance(allowed, SampledToken):
                decided[sequence.request.id] = allowed
            elif sequence.request.grammar:
                rows.append(self._resident.row_of(sequence))
                masks.extend(token_mask(sequence.request, sequence.num_generated, vocab_size, allowed))
        if rows:
            sections = [upload.add(rows), upload.add(masks)]
            numbers_X = upload.send(self._executor.device)
            self._resident.table.load_masks(*(numbers_X[section] for section in sections))
        return decided


class _StepUpload:
    """The single host-to-device copy of a step: its rows and their updates, and what is added to `upload`."""

    def __init__(
        self, executor: DeviceExecutor, plan: BatchPlan, stops: list[int], samples: list[bool], n_drawn: int
    ) -> None:
        self.upload = Upload()
        self._executor = executor
        self.rows, updates = executor.resident.assign_rows(plan.chunks)
        rows, lengths = array("i", compress(self.rows, samples)), array("i", compress(stops, samples))
        n_padding, size = n_drawn - len(rows), len(executor.drawn_X) // 2
        if n_padding:
            rows.extend([executor.resident.padding_row] * n_padding)
            lengths.extend([1] * n_padding)
        self.upload.add(rows, size)
        self.upload.add(lengths, size)
        self._blocks: list[tuple[int, list[slice]]] = []
        if plan.clear or plan.copies:
            self._blocks = [(group, self._preparations(plan, group)) for group in range(len(executor.caches))]
        self._updates = [self.upload.add(section) for section in updates.sections()] if updates else []

    def _preparations(self, plan: BatchPlan, group: int) -> list[slice]:
        """Adds the blocks of a cache group that the step clears first, and those that it copies from and to."""
        clear = [block for other, block in plan.clear if other == group]
        copies = [copy for copy in plan.copies if copy[0] == group]
        return [self.upload.add(column) for column in (clear, *([copy[side] for copy in copies] for side in (1, 2)))]

    def send(self) -> Tensor:
        """Sends all sections, and applies the updates. Returns the sections on the device."""
        numbers_X = self.upload.send(self._executor.device)
        drawn_X = self._executor.drawn_X
        drawn_X.copy_(numbers_X[: drawn_X.numel()])
        for group, sections in self._blocks:
            self._executor.prepare(group, *(numbers_X[section] for section in sections))
        if self._updates:
            self._executor.resident.apply(numbers_X, self._updates)
        return numbers_X


def _scores(numbers_X: Tensor, scoring: Items[tuple[Request, int]]) -> dict[str, tuple[TokenScore, ...] | None]:
    """The scores of each prompt; None if a row was not finite. numbers_X: from DeviceExecutor.score(), on the host."""
    counts = [request.prompt_logprobs or 0 for request, count in scoring for _ in range(count)]
    starts = range(0, len(counts), SCORED_ROWS)
    pieces = numbers_X.view(len(starts), -1) if counts else ()
    rows = iter(
        [
            score
            for start, piece_X in zip(starts, pieces, strict=True)
            for score in SampleOut(piece_X, SCORED_ROWS).scores(counts[start : start + SCORED_ROWS])
        ]
    )
    scores: dict[str, tuple[TokenScore, ...] | None] = {}
    for request, count in scoring:
        own = [next(rows) for _ in range(count)]
        finite = tuple(score for score in own if score is not None)
        scores[request.id] = finite if len(finite) == count else None
    return scores
