"""Runs a step's plan: computes it, samples tokens, collects scores. Holds torch's own way to compute a step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from typing import Protocol

import torch
from torch import Tensor

from app.common.fault_injection import fault
from app.common.types import BatchPlan, Chunk, Request, Sequence, TokenScore
from app.engine.execution.warmup_batches import dummies
from app.engine.memory.encoder_cache import EncoderCache
from app.engine.memory.kv_cache import KVCache, PagedAttend, group_chunks, linear_rows
from app.engine.sampling.sampler_io import SampledToken, SamplingInput, StepResult
from model.config import ModelConfig
from model.nn.layers import seal
from model.nn.transformer import Decoder

# The other way is app/engine/cpu/compute.py. Shape legend: T tokens of the step, D width, V vocabulary.


class StepExecutor(Protocol):
    """A decoder with its KV cache. The bits of a row depend on its own sequence only."""

    config: ModelConfig

    def run(self, plan: BatchPlan) -> Items[Chunk]:
        """Computes every chunk, after what the plan says must be done to blocks; returns them as their rows stand."""
        ...

    def logits(self, rows: Items[int]) -> Tensor:
        """Logits [rows, V] of these rows of the last step; good until the next call."""
        ...


class TorchExecutor:
    """The decoder in torch, operation by operation; on any device, for any decoder."""

    def __init__(self, decoder: Decoder, cache: KVCache, sources: EncoderCache | None = None) -> None:
        seal(decoder)
        self.config = decoder.config
        self._decoder = decoder
        self._cache = cache
        self._sources = sources
        self._hidden_TD = torch.empty(0)
        self._smallest = min(parameter.numel() for parameter in decoder.parameters() if parameter.ndim == 2)

    def run(self, plan: BatchPlan) -> Items[Chunk]:
        """One step: decodes of like length together, every other chunk for itself."""
        if plan.clear:
            self._cache.clear(list(plan.clear))
        if plan.copies:
            self._cache.copy(plan.copies)
        groups = group_chunks(plan.chunks)
        chunks = [chunk for group in groups for chunk in group]
        tokens_T, positions_T, blocks_T = self._inputs(chunks)
        slots_X = self._cache.slot_rows(blocks_T, positions_T % self._cache.block_size)
        cross = self._sources.attend(groups) if self._sources else None
        self._hidden_TD = self._decoder(tokens_T, positions_T, PagedAttend(self._cache, groups, slots_X), cross)
        return chunks

    def logits(self, rows: Items[int]) -> Tensor:
        """In the decoder's number format."""
        padded = [*rows, *[rows[-1]] * (self._padded(len(rows)) - len(rows))]  # as many rows as the law asks for
        return self._decoder.head(self._hidden_TD[torch.tensor(padded, device=self._hidden_TD.device)])[: len(rows)]

    def _inputs(self, chunks: Items[Chunk]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, positions and blocks [T], padded as batch invariance requires."""
        size, padding = self._cache.block_size, self._cache.padding_block
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        for chunk in chunks:
            places = range(chunk.start, chunk.stop)
            tokens += chunk.sequence.tokens[chunk.start : chunk.stop]
            positions += places
            owned = chunk.sequence.blocks
            blocks += [owned[place // size] for place in places] if owned else [padding] * len(places)
        extra = self._padded(len(tokens)) - len(tokens)
        filled = (tokens + [0] * extra, positions + [0] * extra, blocks + [padding] * extra)
        tokens_T, positions_T, blocks_T = torch.tensor(filled, device=self._cache.data.device)
        return tokens_T, positions_T, blocks_T

    def _padded(self, count: int) -> int:
        return linear_rows(count, self._cache.data.dtype, self._smallest)


_PIECE_BYTES = 8 << 20
"""Logits of a prompt that are there at once, in float32: a few copies of so much, instead of the whole prompt's."""


class Sampler(Protocol):
    """app/engine/sampling/sampler.py, or its native counterpart."""

    def sample(self, logits_SV: Tensor, rows: Items[SamplingInput], /) -> list[SampledToken]:
        """One token for each row of logits."""
        ...

    def top_logprobs(self, logits_XV: Tensor, chosen: Items[int], count: int, /) -> list[TokenScore]:
        """For each row of finite logits the given token's log-probability, and the `count` most likely."""
        ...


class TracksGrammars(Protocol):
    """app/engine/guided/grammar_tracker.py, or what stands in for it where nothing is meant."""

    def allowed(self, sequences: Items[Sequence], /) -> list[Tensor | SampledToken | None]:
        """For each sequence the bitmask of what its grammar allows next, on the CPU, None for everything; or what comes
        of the row without a draw."""
        ...

    def follow(self, sequences: Items[Sequence], drawn: list[SampledToken], /) -> list[SampledToken]:
        """Takes in what was drawn, and says what became of it."""
        ...


class Runner:
    """Computes steps and draws from them. Without `guides` there must be no guided request."""

    def __init__(self, compute: StepExecutor, *, sampler: Sampler, guides: TracksGrammars | None = None) -> None:
        self.compute = compute
        self.guides = guides
        self.sampler = sampler
        self._histories: dict[Sequence, array[int]] = {}

    @torch.inference_mode()
    def run(self, plan: BatchPlan) -> StepResult:
        """Computes every chunk, draws a token for those that sample, and scores the prompts of those who ask."""
        fault("engine.forward", plan)
        chunks = self.compute.run(plan)
        scores = self._score(chunks)  # first: a guide that has taken a token in is built again if the step is
        return StepResult(self._draw(chunks), scores)

    def warm_up(self, max_rows: int) -> None:
        """Runs the shapes that real steps have, so that the first request does not pay for first calls."""
        for rows, length in ((1, 1), (min(8, max_rows), 1), (1, min(128, self.compute.config.context))):
            self.run(dummies(rows, length, source=(0,) if self.compute.config.n_encoder_layers else ()))

    def _draw(self, chunks: Items[Chunk]) -> dict[str, SampledToken]:
        ends, drawing, end = [], [], 0
        for chunk in chunks:
            end += chunk.stop - chunk.start
            if chunk.samples:
                ends.append(end - 1)
                drawing.append(chunk.sequence)
        if not drawing:
            return {}
        logits_SV = self.compute.logits(ends)
        # Kept for as long as a sequence draws in every step: it need not be copied from Python's integers each time.
        self._histories = {sequence: self._history(sequence) for sequence in drawing}
        allowed = self.guides.allowed(drawing) if self.guides else [None] * len(drawing)
        done = {
            s.request.id: result for s, result in zip(drawing, allowed, strict=True) if isinstance(result, SampledToken)
        }
        if done:
            rows = [row for row, result in enumerate(allowed) if not isinstance(result, SampledToken)]
            drawing, allowed, logits_SV = (
                [drawing[row] for row in rows],
                [allowed[row] for row in rows],
                logits_SV[rows],
            )
        return done | self._sample(drawing, allowed, logits_SV)

    def _sample(
        self, drawing: list[Sequence], allowed: Items[Tensor | SampledToken | None], logits_SV: Tensor
    ) -> dict[str, SampledToken]:
        if not drawing:
            return {}
        rows = [
            SamplingInput(s.request.params, self._histories[s], len(s.request.prompt), s.request.stop_ids, words)
            for s, words in zip(drawing, allowed, strict=True)
            if not isinstance(words, SampledToken)
        ]
        fault("engine.sample", drawing)
        drawn = self.sampler.sample(logits_SV, rows)
        drawn = self.guides.follow(drawing, drawn) if self.guides else drawn
        return {sequence.request.id: result for sequence, result in zip(drawing, drawn, strict=True)}

    def _history(self, sequence: Sequence) -> array[int]:
        """The sequence's tokens as the sampler takes them best. Tokens are only ever added."""
        history = self._histories.get(sequence) or array("q")
        history.extend(sequence.tokens[len(history) :])
        return history

    def _score(self, chunks: Items[Chunk]) -> dict[str, tuple[TokenScore, ...] | None]:
        scores, start = {}, 0
        for chunk in chunks:
            if places := chunk.scores:
                # A token is foretold by the row before it.
                first = start + places.start - 1 - chunk.start
                rows = range(first, first + len(places))
                scores[chunk.sequence.request.id] = self._score_rows(chunk.sequence.request, places, rows)
            start += chunk.stop - chunk.start
        return scores

    def _score_rows(self, request: Request, places: range, rows: range) -> tuple[TokenScore, ...] | None:
        """One score for each place in the prompt, from one row each; None where a row is not finite."""
        assert request.prompt_logprobs is not None
        fault("engine.score", request)
        piece = max(1, _PIECE_BYTES // (4 * self.compute.config.vocab_size))
        scores: list[TokenScore] = []
        for start in range(0, len(rows), piece):
            tokens = request.prompt[places.start + start : places.stop][:piece]
            logits_XV = self.compute.logits(rows[start : start + piece]).float()
            # One pass, which lets NaN through; isfinite() takes 10 to 20 times as long, and as much memory again.
            if not torch.isfinite(torch.stack(logits_XV.aminmax())).all():
                return None
            scores += self.sampler.top_logprobs(logits_XV, tokens, request.prompt_logprobs)
        return tuple(scores)
