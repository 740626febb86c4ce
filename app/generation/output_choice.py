"""One choice of an answer: prompt echo, detokenizing, stop strings, log-probabilities."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from app.common.fault_injection import fault
from app.common.types import FinishReason, PromptScores, Request, SampledEvent
from app.generation.detokenizer import StopMatcher, StreamDecoder
from app.generation.request import Delta, Finished, TokenDetail, Top
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


@dataclass(frozen=True, slots=True)
class TextRules:
    """What a request says about the text, beyond the tokens."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end a text by themselves, and are never shown."""


class OutputChoice:
    """Takes a sequence's events in and gives text out. After `ended` is set nothing more comes."""

    def __init__(
        self, index: int, request: Request, tokenizer: Tokenizer, rules: TextRules, echo: PromptEcho | None = None
    ) -> None:
        self.index = index
        self.echo = echo
        """The prompt, where it is still to be told before the text."""
        self.n_tokens = 0
        self.logprob_sum = 0.0
        self.ended: Finished | None = None
        self._request = request
        self._tokenizer = tokenizer
        self._rules = rules
        self._decoder = StreamDecoder()
        # A prompt of special tokens alone is no text yet, and what follows is its beginning.
        nothing_yet = not any(tokenizer.token_bytes(token) for token in request.prompt)
        self._strips_space = nothing_yet and tokenizer.strips_first_space
        self._matcher = StopMatcher(rules.stops)
        self._base = len(echo.text) if echo else 0
        self._decoded = self._sent = 0
        self._held: deque[tuple[int, TokenDetail]] = deque()  # (end of its text, token)

    @property
    def mean_logprob(self) -> float:
        """Of the tokens drawn, where the engine reported them; what best_of ranks by."""
        return self.logprob_sum / max(1, self.n_tokens)

    def take(self, event: SampledEvent) -> list[Delta]:
        """The text that a token completes, and the end if it is the last."""
        if self._is_plain and event.token is not None and event.logprob is None and event.finish is None:
            return self._take_plain(event.token)
        deltas = self._begin()
        text = self._matched(self._decode(event))
        deltas += self._delta(text, final=False)
        if self._matcher.matched is not None:
            deltas += self._end_at_stop(self._matcher.matched)
        elif event.finish:
            deltas += self.end(str(event.finish), self._stop_reason(event))
        return deltas

    @property
    def _is_plain(self) -> bool:
        """Nothing is to be told before the text, looked for in it, or taken from it."""
        return not (self._rules.stops or self._strips_space or self.echo)

    def _take_plain(self, token: int) -> list[Delta]:
        """What nearly all tokens need of take()."""
        self.n_tokens += 1
        text = self._decoder.feed(self._tokenizer.token_bytes(token))
        self._decoded += len(text)
        self._sent += len(text)
        return [Delta(self.index, text)] if text else []

    def end(self, finish_reason: str, stop_reason: str | int | None = None) -> list[Delta]:
        """Ends the text where it stands: gives what was held back."""
        deltas = self._begin()
        deltas += self._delta(self._matcher.feed(self._decoder.flush()) + self._matcher.flush(), final=False)
        if self._matcher.matched is not None:
            return [*deltas, *self._end_at_stop(self._matcher.matched)]
        self.ended = Finished(self.index, finish_reason, stop_reason)
        return [*deltas, *self._delta("", final=True)]

    def _end_at_stop(self, stop: str) -> list[Delta]:
        self.ended = Finished(self.index, "stop", stop)
        return self._delta(stop if self._rules.include_stop else "", final=True)

    def _begin(self) -> list[Delta]:
        """The echo, once."""
        echo, self.echo = self.echo, None
        return echo.deltas(self.index) if echo else []

    def _matched(self, text: str) -> str:
        fault("text.stop", self._request)
        # Stops are not taken before min_tokens: what came so far is text whatever it says.
        return text if self.n_tokens <= self._rules.min_tokens else self._matcher.feed(text)

    def _stop_reason(self, event: SampledEvent) -> int | None:
        told = event.finish is FinishReason.STOP and event.token not in self._rules.eos_ids
        return event.token if told and event.token in self._request.stop_ids else None

    def _decode(self, event: SampledEvent) -> str:
        fault("text.decode", self._request)  # here and not in _take_plain(): nearly all tokens would pay for it
        if event.token is None:
            return ""
        self.n_tokens += 1
        data = self._bytes(event)
        if self._strips_space and data:
            data, self._strips_space = data.removeprefix(b" "), False
        first = self._decoded + self._decoder.broken_by(data)
        text = self._decoder.feed(data)
        if event.logprob is not None:
            self.logprob_sum += event.logprob
            detail = TokenDetail(event.token, event.logprob, event.top, self._base + first)
            self._held.append((self._decoded + len(text), detail))
        self._decoded += len(text)
        return text

    def _bytes(self, event: SampledEvent) -> bytes:
        """A token that ends the text is none of it, whatever the tokenizer would show for it."""
        assert event.token is not None
        ends = event.finish is FinishReason.STOP and event.token in self._request.stop_ids
        hidden = ends and not (self._rules.include_stop and event.token not in self._rules.eos_ids)
        return b"" if hidden else self._tokenizer.token_bytes(event.token)

    def _delta(self, text: str, *, final: bool) -> list[Delta]:
        """A Delta, if there is anything to say.

        Tokens wait for their text, also those that only begin a character; those behind a stop are never shown.
        """
        self._sent += len(text)
        everything = final and self._matcher.matched is None
        ready = []
        while self._held:
            end, detail = self._held[0]
            first = detail.offset - self._base
            if not (everything or (first < self._sent and (final or end <= self._sent))):
                break
            ready.append(detail)
            self._held.popleft()
        return [Delta(self.index, text, tuple(ready))] if text or ready else []
