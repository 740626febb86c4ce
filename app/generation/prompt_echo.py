"""A prompt as the beginning of a text, for all choices that continue it. Knows no clock and no JSON."""

from __future__ import annotations

from itertools import pairwise

from app.common.types import PromptScores
from app.generation.detokenizer import StreamDecoder
from app.generation.events import Delta, TokenDetail, Top
from model.tokenizer.tokenizer import Tokenizer

_PIECE = 8
"""Tokens that are told at once: thousands of them, each with its alternatives, take seconds to write."""


class PromptEcho:
    """Gathers the log-probabilities of the prompt's tokens, where they were asked for."""

    def __init__(self, text: str, ids: tuple[int, ...], tokenizer: Tokenizer, *, is_scored: bool) -> None:
        self.text = text
        self._ids = ids
        self._tokenizer = tokenizer
        self._is_scored = is_scored
        self._scores: list[tuple[float | None, Top]] = [(None, ())]
        self._pieces: list[tuple[str, tuple[TokenDetail, ...]]] = []

    def add(self, scores: PromptScores) -> None:
        """The next tokens' log-probabilities."""
        self._scores += scores.tokens

    def deltas(self, index: int) -> list[Delta]:
        """The whole of it, for choice `index`; of tokens, those that were scored before the text had to end."""
        if not self._pieces:
            self._pieces = self._cut(self._details()) if self._is_scored else [(self.text, ())]
        return [Delta(index, text, tokens) for text, tokens in self._pieces]

    def _details(self) -> list[TokenDetail]:
        decoder, offset, details = StreamDecoder(), 0, []
        for token, (logprob, top) in zip(self._ids, self._scores, strict=False):
            data = self._tokenizer.token_bytes(token)
            details.append(TokenDetail(token, logprob, top, offset + decoder.broken_by(data)))
            offset += len(decoder.feed(data))
        return details

    def _cut(self, details: list[TokenDetail]) -> list[tuple[str, tuple[TokenDetail, ...]]]:
        starts = range(0, len(details), _PIECE)
        ends = [min(details[start].offset, len(self.text)) for start in starts]
        places = [0, *ends[1:], len(self.text)]
        return [
            (self.text[begin:end], tuple(details[start : start + _PIECE]))
            for start, (begin, end) in zip(starts, pairwise(places), strict=True)
        ]
