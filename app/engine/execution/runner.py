"""Runs a step's plan: computes it, samples tokens, collects scores."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from itertools import islice
from typing import Any, Protocol

from app.common.fault_injection import fault
from app.common.types import Request, TokenScore
from app.engine.execution.warmup_batches import dummies
from app.engine.sampling.parameters import SamplingInput, is_counted
from app.engine.sampling.sampled_token import DRAFTS_NOT_FINITE, MASK_NOT_READY, SampledToken
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, Sequence, StepResult
from model.config import ModelConfig
from model.number_formats import Array

# The executors are in app/engine/cpu/executor.py (C++) and in torch_executor.py. Shape legend: V vocabulary.

Logits = Any
"""[rows, V]: a numpy array or a torch tensor, which the executor returns and the sampler of the same backend takes."""


class StepExecutor(Protocol):
    """A decoder with its KV cache. The bits of a row depend on its own sequence only."""

    config: ModelConfig
    not_finite: Items[Chunk]
    """Of the last step: non_finite_chunks() of app/engine/scheduling/batch_plan.py. No window or chunk hides them."""

    def run(self, plan: BatchPlan) -> Items[Chunk]:
        """Clears and copies blocks as planned, then computes every chunk; returns the chunks in the order of rows."""
        ...

    def logits(self, rows: Items[int]) -> Logits:
        """Logits [rows, V] of these rows of the last step; valid until the next call."""
        ...


_NOT_FINITE = SampledToken(None)
_PIECE_BYTES = 8 << 20
"""Bytes of float32 prompt logits that are scored at once; bounds the memory of a few copies of them."""


class Sampler(Protocol):
    """Samples tokens: app/engine/sampling/sampler.py, or its C++ counterpart."""

    def sample(self, logits_SV: Logits, rows: Items[SamplingInput], /) -> list[SampledToken]:
        """One token for each row of logits."""
        ...

    def top_logprobs(self, logits_XV: Logits, chosen: Items[int], count: int, /) -> list[TokenScore] | None:
        """For each row: the given token's log-probability, and the `count` most likely tokens.

        None if not all logits are finite.
        """
        ...


class MaskProvider(Protocol):
    """Token masks of grammars: app/engine/guided/grammar_tracker.py, or masks without a grammar for warm-up."""

    def allowed(self, sequences: Items[Sequence], /) -> list[Array | SampledToken | None]:
        """For each sequence the bitmask of tokens that its grammar allows next, on the CPU, or None for all tokens; a
        SampledToken is the row's result without sampling."""
        ...

    def allowed_after(self, sequence: Sequence, drafts: tuple[int, ...], /) -> Items[Array | SampledToken | None]:
        """The same for the rows after each draft of a sequence that allowed() gave a mask or None."""
        ...

    def accept_tokens(self, sequences: Items[Sequence], sampled: list[SampledToken], /) -> list[SampledToken]:
        """Advances the grammars by the sampled tokens; returns the tokens, marked where the text may end."""
        ...

    def accept_drafts(
        self, sequence: Sequence, drafts: tuple[int, ...], rows: tuple[SampledToken, ...], /
    ) -> tuple[SampledToken, ...]:
        """The same for the rows of one sequence, up to the first one that differs from its draft."""
        ...


class SampledRows:
    """Sequences that sample, and what of them stays the same while the same sequences do: only their tokens grow."""

    __slots__ = ("counts", "ids", "is_guided", "sequences")

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.ids = [sequence.request.id for sequence in sequences]
        self.counts = [sequence.request.params.logprobs for sequence in sequences]
        """Most likely tokens that are reported; None: no log-probabilities."""
        self.is_guided = any(sequence.request.grammar for sequence in sequences)


class Runner:
    """Computes steps and samples from them. Without `grammars` there must be no guided request."""

    def __init__(self, executor: StepExecutor, *, sampler: Sampler, grammars: MaskProvider | None = None) -> None:
        self.executor = executor
        self.grammars = grammars
        self.sampler = sampler
        self._sampled_rows = SampledRows([])
        self._inputs: list[SamplingInput] = []
        """Of the rows, without masks."""

    def run(self, plan: BatchPlan) -> StepResult:
        """Computes every chunk, samples where a chunk ends a prompt or decodes, and scores prompts if requested."""
        fault("engine.forward", plan)
        chunks = self.executor.run(plan)
        scores = self._score(chunks)  # first: once grammars have accepted tokens, a retry must rebuild them
        sampled = self._draw(chunks)
        for chunk in self.executor.not_finite:
            sampled[chunk.sequence.request.id] = (DRAFTS_NOT_FINITE if chunk.drafts else _NOT_FINITE,)
        return StepResult(sampled, scores)

    def warm_up(self, max_rows: int) -> None:
        """Runs the shapes that real steps have, so that the first request does not pay for first calls."""
        for rows, length in ((1, 1), (min(8, max_rows), 1), (1, min(128, self.executor.config.context))):
            self.run(dummies(rows, length, source=(0,) if self.executor.config.n_encoder_layers else ()))

    def _draw(self, chunks: Items[Chunk]) -> dict[str, tuple[SampledToken, ...]]:
        last_rows, sampling, end = [], [], 0
        for chunk in chunks:
            sequence, stop = chunk.sequence, chunk.stop
            end += stop - chunk.start
            if stop >= len(sequence.tokens):  # chunk.samples
                if chunk.drafts:
                    return self._draw_several(chunks)
                last_rows.append(end - 1)
                sampling.append(sequence)
        if not sampling:
            return {}
        logits_SV = self.executor.logits(last_rows)
        if sampling != self._sampled_rows.sequences:
            self._sampled_rows = SampledRows(sampling)
            self._inputs = [_sampling_input(sequence, sequence.tokens, None) for sequence in sampling]
        rows = self._sampled_rows
        if rows.is_guided and self.grammars:
            tokens, allowed = [sequence.tokens for sequence in sampling], self.grammars.allowed(sampling)
            sampled = self._sample_allowed(sampling, tokens, allowed, logits_SV, self.grammars.accept_tokens)
        else:
            sampled = self._sample(sampling, self._inputs, logits_SV)
        return dict(zip(rows.ids, zip(sampled), strict=True))

    def _draw_several(self, chunks: Items[Chunk]) -> dict[str, tuple[SampledToken, ...]]:
        """Does what _draw() does for a step in which a chunk has drafts."""
        drawn, indices, end = [chunk for chunk in chunks if chunk.samples], list[int](), 0
        for chunk in chunks:
            end += chunk.stop - chunk.start
            indices += [end - chunk.stop + row for row in chunk.sampled_rows]
        sequences = [chunk.sequence for chunk in drawn for _ in chunk.sampled_rows]
        tokens = [each for chunk in drawn for each in _tokens_of_rows(chunk)]
        allowed = self._allowed_in(drawn)
        sampled = iter(self._sample_allowed(sequences, tokens, allowed, self.executor.logits(indices)))
        return {chunk.sequence.request.id: self._verified(chunk, sampled) for chunk in drawn}

    def _allowed_in(self, drawn: Items[Chunk]) -> list[Array | SampledToken | None]:
        """The mask or result of each row that the chunks sample."""
        if self.grammars is None:
            return [None for chunk in drawn for _ in chunk.sampled_rows]
        masks, allowed = self.grammars.allowed([chunk.sequence for chunk in drawn]), list[Array | SampledToken | None]()
        for chunk, mask in zip(drawn, masks, strict=True):
            allowed.append(mask)
            if isinstance(mask, SampledToken):
                allowed += [mask] * len(chunk.drafts)
            elif chunk.drafts:
                allowed += self.grammars.allowed_after(chunk.sequence, chunk.drafts)
        return allowed

    def _verified(self, chunk: Chunk, sampled: Iterator[SampledToken]) -> tuple[SampledToken, ...]:
        """The chunk's rows, with its grammar advanced by the accepted ones."""
        rows = tuple(islice(sampled, 1 + len(chunk.drafts)))
        if chunk.drafts and not all(map(_has_result, rows)):
            return (DRAFTS_NOT_FINITE,)
        return self.grammars.accept_drafts(chunk.sequence, chunk.drafts, rows) if self.grammars else rows

    def _sample_allowed(
        self,
        sequences: list[Sequence],
        tokens: Items[Items[int]],
        allowed: list[Array | SampledToken | None],
        logits_SV: Logits,
        accept: Callable[[list[Sequence], list[SampledToken]], list[SampledToken]] = lambda _sequences, sampled: (
            sampled
        ),
    ) -> list[SampledToken]:
        """Samples each row with its mask, unless its result is decided without sampling; `accept` sees the others."""
        masks = {row: mask for row, mask in enumerate(allowed) if not isinstance(mask, SampledToken)}
        if 0 < len(masks) < len(allowed):
            logits_SV = logits_SV[[*masks]]
        inputs = [_sampling_input(sequences[row], tokens[row], mask) for row, mask in masks.items()]
        sequences = [sequences[row] for row in masks]
        in_turn = iter(accept(sequences, self._sample(sequences, inputs, logits_SV)) if masks else ())
        return [mask if isinstance(mask, SampledToken) else next(in_turn) for mask in allowed]

    def _sample(self, sequences: list[Sequence], inputs: list[SamplingInput], logits_SV: Logits) -> list[SampledToken]:
        fault("engine.sample", sequences)
        return self.sampler.sample(logits_SV, inputs)

    def _score(self, chunks: Items[Chunk]) -> dict[str, tuple[TokenScore, ...] | None]:
        scores, start = {}, 0
        for chunk in chunks:
            if chunk.sequence.request.prompt_logprobs is not None and (positions := chunk.scores):
                # The row before a token predicts it.
                first = start + positions.start - 1 - chunk.start
                rows = range(first, first + len(positions))
                scores[chunk.sequence.request.id] = self._score_rows(chunk.sequence.request, positions, rows)
            start += chunk.stop - chunk.start
        return scores

    def _score_rows(self, request: Request, positions: range, rows: range) -> tuple[TokenScore, ...] | None:
        """One score for each position in the prompt, from one row each; None if a row is not finite."""
        assert request.prompt_logprobs is not None
        fault("engine.score", request)
        piece = max(1, _PIECE_BYTES // (4 * self.executor.config.vocab_size))
        scores: list[TokenScore] = []
        for start in range(0, len(rows), piece):
            tokens = request.prompt[positions.start + start : positions.stop][:piece]
            logits_XV = self.executor.logits(rows[start : start + piece])
            scored = self.sampler.top_logprobs(logits_XV, tokens, request.prompt_logprobs)
            if scored is None:
                return None
            scores += scored
        return tuple(scores)


def _tokens_of_rows(chunk: Chunk) -> list[Items[int]]:
    """What each sampled row of a chunk follows; its number alone where sampling depends on nothing else."""
    if not is_counted(chunk.sequence.request.params):
        return [range(row + 1) for row in chunk.sampled_rows]
    known = chunk.sequence.tokens + array("q", chunk.drafts)
    return [known[: row + 1] for row in chunk.sampled_rows]


def _has_result(row: SampledToken) -> bool:
    return row.token is not None or row is MASK_NOT_READY or bool(row.finish or row.failure)


def _sampling_input(sequence: Sequence, tokens: Items[int], mask: Array | None) -> SamplingInput:
    request = sequence.request
    return SamplingInput(request.params, tokens, sequence.n_prompt, request.stop_ids, mask)
