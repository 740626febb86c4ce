"""Incremental detokenizer: from the tokens of one choice to its text, with echo, stop strings and log-probabilities."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise

from msgspec.structs import replace

from app.common.fault_injection import fault
from app.common.types import FinishReason, PromptScores, Request, SampledEvent
from app.generation.request import Delta, Finished, TokenDetail, Top
from app.generation.stop_matcher import MarkedStops, StopMatcher, without_marks
from model.tokenizer.tokenizer import Tokenizer

_TOKENS_PER_DELTA = 8
"""Tokens per Delta of the echo: encoding thousands of them with their alternatives at once takes seconds."""


class StreamDecoder:
    """Incremental UTF-8 decoder that emits whole characters; invalid bytes become U+FFFD. Decodes each byte once."""

    __slots__ = ("_decoder", "_is_whole")

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_whole = True  # no incomplete character is pending

    def feed(self, data: bytes) -> str:
        """The characters that `data` completes."""
        if self._is_whole and data.isascii():  # nearly all tokens, in half the time
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self._is_whole = not self._decoder.getstate()[0]
        return text

    def broken_by(self, data: bytes) -> int:
        """Number of U+FFFD that a pending incomplete character becomes if `data` does not continue it."""
        pending = self._decoder.getstate()[0]
        is_continuation = not data or 0x80 <= data[0] < 0xC0
        return 0 if is_continuation else len(pending.decode("utf-8", "replace"))

    def flush(self) -> str:
        """The end of the text: one U+FFFD for an incomplete character, or nothing."""
        return self._decoder.decode(b"", final=True)


class PromptEcho:
    """Collects the log-probabilities of the prompt's tokens, if requested."""

    def __init__(
        self,
        text: str,
        ids: tuple[int, ...],
        tokenizer: Tokenizer,
        *,
        is_scored: bool,
        starts: Sequence[int] | None = None,
    ) -> None:
        """starts: where each token begins in `text`; None if `text` is the decoded tokens."""
        self.text = text
        self._ids = ids
        self._tokenizer = tokenizer
        self._is_scored = is_scored
        self._starts = starts
        self._scores: list[tuple[float | None, Top]] = [(None, ())]
        self._pieces: list[tuple[str, tuple[TokenDetail, ...], int]] = []

    @property
    def n_scored(self) -> int:
        """Tokens that come with log-probabilities."""
        return len(self._ids) if self._is_scored else 0

    def add(self, scores: PromptScores) -> None:
        """Adds the log-probabilities of the next tokens."""
        self._scores += scores.tokens

    def deltas(self, index: int) -> list[Delta]:
        """The echoed prompt for choice `index`, with the tokens that were scored before the request ended."""
        if not self._pieces:
            self._pieces = self._cut(self._details()) if self._is_scored else [(self.text, (), 0)]
        return [Delta(index, *piece) for piece in self._pieces]

    def _details(self) -> list[TokenDetail]:
        starts = self._decoded_starts() if self._starts is None else self._starts
        return [
            TokenDetail(token, logprob, top, min(start, len(self.text)))
            for token, (logprob, top), start in zip(self._ids, self._scores, starts, strict=False)
        ]

    def _decoded_starts(self) -> Iterator[int]:
        decoder, offset = StreamDecoder(), 0
        for token in self._ids:
            data = self._tokenizer.token_bytes(token)
            yield offset + decoder.broken_by(data)
            offset += len(decoder.feed(data))

    def _cut(self, details: list[TokenDetail]) -> list[tuple[str, tuple[TokenDetail, ...], int]]:
        """The text in parts, each with its tokens and its start; text that no token covers follows its predecessor."""
        firsts = range(0, len(details), _TOKENS_PER_DELTA)
        # A tokenizer that reorders characters may have a token that starts before its predecessor.
        starts = accumulate((details[first].offset for first in firsts), max)
        bounds = [0, *islice(starts, 1, None), len(self.text)]
        return [
            (self.text[begin:end], tuple(details[first : first + _TOKENS_PER_DELTA]), begin)
            for first, (begin, end) in zip(firsts, pairwise(bounds), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class TextRules:
    """A request's text-level rules: echo, stop strings, log-probabilities."""

    stops: tuple[str, ...] = ()
    marked_stops: MarkedStops = field(default_factory=MarkedStops)
    """The `stops` that name special tokens."""
    include_stop: bool = False
    min_tokens: int = 0
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end the text, and are never shown."""
    returns_ids: bool = False
    """Whether each Delta has the ids sampled since the previous one."""


class OutputChoice:
    """Turns a sequence's token events into text deltas. Emits nothing after `ended` is set."""

    __slots__ = (  # as in OpenSequences
        *("index", "echo", "n_tokens", "last_token_at", "logprob_sum", "ended", "_request", "_tokenizer", "_rules"),
        *("_decoder", "_strips_space", "_is_plain", "_matcher", "_base", "_decoded", "_sent", "_pending_tokens"),
        *("_marks", "_bytes_of", "_unsent_ids", "first"),
    )

    def __init__(
        self, index: int, request: Request, tokenizer: Tokenizer, rules: TextRules, echo: PromptEcho | None = None
    ) -> None:
        self.index = index
        self.echo = echo
        """The prompt, if it must still be sent before the text."""
        self.first: Sequence[Delta] = ()
        """Text that is sent before the engine adds tokens, in a response that was resumed."""
        self.n_tokens = 0
        self.last_token_at: float | None = None
        """When the engine sampled the last token, in monotonic seconds; None after an interruption."""
        self.logprob_sum = 0.0
        self.ended: Finished | None = None
        self._request = request
        self._tokenizer = tokenizer
        self._bytes_of = tokenizer.bytes_of
        self._rules = rules
        self._decoder = StreamDecoder()
        # A prompt of special tokens only has no text, so the completion is the start of the text.
        self._strips_space = tokenizer.strips_first_space and not any(map(tokenizer.token_bytes, request.prompt))
        self._unsent_ids: list[int] | None = [] if rules.returns_ids else None
        self._is_plain = not (rules.stops or self._strips_space or echo or rules.returns_ids)
        """Whether the text needs no echo, no stop strings, no ids and no change of its start."""
        self._matcher = StopMatcher(rules.stops, rules.marked_stops.stops)
        self._marks = rules.marked_stops.marks
        self._base = len(echo.text) if echo else 0
        self._decoded = self._sent = 0
        self._pending_tokens: deque[tuple[int, TokenDetail]] = deque()  # (end of its text, token)

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the sampled tokens, if the engine reported them; best_of ranks by it."""
        return self.logprob_sum / max(1, self.n_tokens)

    def add(self, event: SampledEvent) -> Sequence[Delta]:
        """Adds a token; returns the text that it completes, and the finish if it is the last."""
        token = event.token
        if self._is_plain and token is not None and event.logprob is None and event.finish is None:  # nearly all tokens
            self.n_tokens += 1
            data = self._bytes_of[token] if token < len(self._bytes_of) else b""
            text = self._decoder.feed(data)
            return (Delta(self.index, text),) if text else ()
        if self._unsent_ids is not None and token is not None:
            self._unsent_ids.append(token)
        deltas = self._take_echo()
        text = self._matched(self._decode(event))
        deltas += self._delta(text, final=False)
        if self._matcher.matched is not None:
            deltas += self._end_at_stop(self._matcher.matched)
        elif event.finish:
            deltas += self._finish(str(event.finish), self._stop_reason(event))
        return self._with_ids(deltas) if self._unsent_ids else deltas

    def finish(self, finish_reason: str) -> Sequence[Delta]:
        """Finishes the choice now; returns the text that was held back."""
        return self._with_ids(self._finish(finish_reason))

    def _with_ids(self, deltas: list[Delta]) -> list[Delta]:
        """The deltas, the last of which gets the ids since the previous one; at the end there is one, even if empty."""
        if self._unsent_ids:
            if self.ended and not deltas:
                deltas = [Delta(self.index, "", (), self._base + self._sent)]
            if deltas:
                deltas[-1] = replace(deltas[-1], ids=tuple(self._unsent_ids))
                self._unsent_ids.clear()
        return deltas

    def _finish(self, finish_reason: str, stop_reason: str | int | None = None) -> list[Delta]:
        deltas = self._take_echo()
        deltas += self._delta(self._matcher.feed(self._decoder.flush()) + self._matcher.flush(), final=False)
        if self._matcher.matched is not None:
            return [*deltas, *self._end_at_stop(self._matcher.matched)]
        self.ended = Finished(self.index, finish_reason, stop_reason)
        return [*deltas, *self._delta("", final=True)]

    def _end_at_stop(self, stop: str) -> list[Delta]:
        self.ended = Finished(self.index, "stop", stop)
        return self._delta(stop if self._rules.include_stop else "", final=True)

    def _take_echo(self) -> list[Delta]:
        """The echoed prompt on the first call, then nothing."""
        echo, self.echo = self.echo, None
        return echo.deltas(self.index) if echo else []

    def _matched(self, text: str) -> str:
        fault("text.stop", self._request)
        # Stop strings are ignored before min_tokens: release everything that was held back.
        return text if self.n_tokens <= self._rules.min_tokens else self._matcher.feed(text)

    def _stop_reason(self, event: SampledEvent) -> int | None:
        is_client_stop = event.finish is FinishReason.STOP and event.token not in self._rules.eos_ids
        return event.token if is_client_stop and event.token in self._request.stop_ids else None

    def _decode(self, event: SampledEvent) -> str:
        fault("text.decode", self._request)  # not for plain tokens, which it would slow down
        if event.token is None:
            return ""
        self.n_tokens += 1
        data = self._bytes(event)
        if self._strips_space and data:
            data, self._strips_space = data.removeprefix(b" "), False
        first = self._decoded + self._decoder.broken_by(data)
        # A special token that may end the text ends a character, too.
        text = self._decoder.flush() if event.token in self._marks else self._decoder.feed(data)
        if event.logprob is not None:
            self.logprob_sum += event.logprob
            detail = TokenDetail(event.token, event.logprob, event.top, self._base + first)
            self._pending_tokens.append((self._decoded + len(text), detail))
        self._decoded += len(text)
        return text + self._marks.get(event.token, "")

    def _bytes(self, event: SampledEvent) -> bytes:
        """The token's bytes; a token that ends the text has none."""
        assert event.token is not None
        ends = event.finish is FinishReason.STOP and event.token in self._request.stop_ids
        hidden = ends and not (self._rules.include_stop and event.token not in self._rules.eos_ids)
        return b"" if hidden else self._tokenizer.token_bytes(event.token)

    def _delta(self, text: str, *, final: bool) -> list[Delta]:
        """A Delta, if there is text or a token to send.

        Tokens are held back until their text is sent, including those that only start a character; tokens after a stop
        string are never shown.
        """
        if self._marks:
            text = without_marks(text)
        start, self._sent = self._base + self._sent, self._sent + len(text)
        is_everything = final and self._matcher.matched is None
        ready = []
        while self._pending_tokens:
            end, detail = self._pending_tokens[0]
            first = detail.offset - self._base
            if not (is_everything or (first < self._sent and (final or end <= self._sent))):
                break
            ready.append(detail)
            self._pending_tokens.popleft()
        return [Delta(self.index, text, tuple(ready), start)] if text or ready else []
