"""A batch plan to drawn tokens: everything that touches the device happens here. Knows no queue and no pipe."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from app.engine.guides import Guides
from app.engine.kv_cache import KVCache, PagedAttend, group_chunks, linear_rows
from app.engine.logprobs import top_logprobs
from app.engine.params import SamplingParams
from app.engine.sampler import sample
from app.engine.sampling_row import SamplingRow
from app.engine.source_cache import SourceCache
from app.engine.types import BatchPlan, Chunk, Drawn, Request, Sequence, StepResult, TokenScore
from model.layers import seal
from model.transformer import Decoder

_PIECE_BYTES = 8 << 20
"""Logits of a prompt that are there at once, in float32: a few copies of so much, instead of the whole prompt's."""


class Runner:
    """Owns the decoder, the KV cache and, where there is an encoder, the cache of what it read.

    Without `guides` there must be no guided request.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, sources: SourceCache | None = None, guides: Guides | None = None
    ) -> None:
        seal(decoder)
        self.decoder = decoder
        self.cache = cache
        self.sources = sources
        self.guides = guides
        self.device = cache.data.device
        self._histories: dict[Sequence, array[int]] = {}
        self._smallest = min(parameter.numel() for parameter in decoder.parameters() if parameter.ndim == 2)

    @torch.inference_mode()
    def run(self, plan: BatchPlan) -> StepResult:
        """Computes every chunk, draws a token for those that sample, and scores the prompts of those who ask."""
        if plan.clear:
            self.cache.clear(list(plan.clear))
        if plan.copies:
            self.cache.copy(plan.copies)
        groups = group_chunks(plan.chunks)
        chunks = [chunk for group in groups for chunk in group]
        tokens_T, positions_T, blocks_T = self._inputs(chunks)
        slots_X = self.cache.slot_rows(blocks_T, positions_T % self.cache.block_size)
        cross = self.sources.attend(groups) if self.sources else None
        hidden_TD = self.decoder(tokens_T, positions_T, PagedAttend(self.cache, groups, slots_X), cross)
        return StepResult(self._draw(chunks, hidden_TD), self._score(chunks, hidden_TD))

    def warm_up(self, max_rows: int) -> None:
        """Runs the shapes that real steps have, so that the first request does not pay for first calls."""
        for rows, length in ((1, 1), (min(8, max_rows), 1), (1, min(128, self.decoder.config.context))):
            source = (0,) if self.sources else ()
            sequences = [_dummy(f"warm-up {i}", length, source) for i in range(rows)]
            self.run(BatchPlan(tuple(Chunk(sequence, 0, length) for sequence in sequences)))

    def _inputs(self, chunks: Items[Chunk]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, positions and blocks [T], padded to what the law of rows asks for."""
        size, padding = self.cache.block_size, self.cache.padding_block
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
        tokens_T, positions_T, blocks_T = torch.tensor(filled, device=self.device)
        return tokens_T, positions_T, blocks_T

    def _padded(self, count: int) -> int:
        return linear_rows(count, self.cache.data.dtype, self._smallest)

    def _draw(self, chunks: Items[Chunk], hidden_TD: Tensor) -> dict[str, Drawn]:
        ends, drawing, end = [], [], 0
        for chunk in chunks:
            end += chunk.stop - chunk.start
            if chunk.samples:
                ends.append(end - 1)
                drawing.append(chunk.sequence)
        if not drawing:
            return {}
        logits_SV = self._logits(hidden_TD, ends)
        # Kept for as long as a sequence draws in every step: it need not be copied from Python's integers each time.
        self._histories = {sequence: self._history(sequence) for sequence in drawing}
        allowed = self.guides.allowed(drawing) if self.guides else [None] * len(drawing)
        rows = [
            SamplingRow(s.request.params, self._histories[s], len(s.request.prompt), s.request.stop_ids, words)
            for s, words in zip(drawing, allowed, strict=True)
        ]
        drawn = sample(logits_SV, rows)
        drawn = self.guides.follow(drawing, drawn) if self.guides else drawn
        return {sequence.request.id: result for sequence, result in zip(drawing, drawn, strict=True)}

    def _history(self, sequence: Sequence) -> array[int]:
        """The sequence's tokens as the sampler takes them best. Tokens are only ever added."""
        history = self._histories.get(sequence) or array("q")
        history.extend(sequence.tokens[len(history) :])
        return history

    def _score(self, chunks: Items[Chunk], hidden_TD: Tensor) -> dict[str, tuple[TokenScore, ...] | None]:
        scores, start = {}, 0
        for chunk in chunks:
            if places := chunk.scores:
                # A token is foretold by the row before it.
                first = start + places.start - 1 - chunk.start
                rows = range(first, first + len(places))
                scores[chunk.sequence.request.id] = self._score_rows(chunk.sequence.request, places, hidden_TD, rows)
            start += chunk.stop - chunk.start
        return scores

    def _score_rows(
        self, request: Request, places: range, hidden_TD: Tensor, rows: range
    ) -> tuple[TokenScore, ...] | None:
        """One score for each place in the prompt, from one row each; None where a row is not finite."""
        assert request.prompt_logprobs is not None
        piece = max(1, _PIECE_BYTES // (4 * self.decoder.config.vocab_size))
        scores: list[TokenScore] = []
        for start in range(0, len(rows), piece):
            tokens = request.prompt[places.start + start : places.stop][:piece]
            logits_XV = self._logits(hidden_TD, rows[start : start + piece]).float()
            # One pass, which lets NaN through; isfinite() takes 10 to 20 times as long, and as much memory again.
            if not torch.isfinite(torch.stack(logits_XV.aminmax())).all():
                return None
            tokens_X = torch.tensor(tokens, device=self.device)
            scores += top_logprobs(logits_XV, tokens_X, [request.prompt_logprobs] * len(tokens))
        return tuple(scores)

    def _logits(self, hidden_TD: Tensor, rows: Items[int]) -> Tensor:
        """Of these rows, by as many rows as the law asks for."""
        padded = [*rows, *[rows[-1]] * (self._padded(len(rows)) - len(rows))]
        return self.decoder.head(hidden_TD[torch.tensor(padded, device=self.device)])[: len(rows)]


def _dummy(name: str, length: int, source: tuple[int, ...]) -> Sequence:
    """A sequence without blocks: what it writes lands in the padding block."""
    params = SamplingParams(temperature=0.8, top_p=0.9, logprobs=1)
    request = Request(id=name, prompt=(0,) * length, max_tokens=1, params=params, source=source)
    return Sequence(request=request, tokens=[0] * length, arrival=0)
