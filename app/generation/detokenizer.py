"""Incremental detokenizer: from the tokens of one choice to its text, with echo, stop strings and log-probabilities."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from app.common.fault_injection import fault
from app.common.types import FinishReason, PromptScores, Request, SampledEvent
from app.generation.request import Delta, Finished, TokenDetail, Top
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


class StopMatcher:
    """Passes text through up to the first stop string, however the text is split into chunks.

    The earliest match wins, and of several the longest. Holds back only text that may still be part of a stop string;
    emits nothing once `matched` is set.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._max_length = max(map(len, stops), default=0)
        self._pending_text = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> str:
        """Adds text; returns the part that can be sent now."""
        if self.matched is not None:
            return ""
        buffer = self._pending_text + text
        start, stop = self._find(buffer)
        pending = self._pending(buffer)
        if stop is not None and start < pending:
            return self._end(buffer[:start], stop)
        # An earlier or longer match may still be completed.
        self._pending_text = buffer[pending:]
        return buffer[:pending]

    def flush(self) -> str:
        """The end of the text: returns what was held back, up to a match in it."""
        if self.matched is not None:
            return ""
        buffer, self._pending_text = self._pending_text, ""
        start, stop = self._find(buffer)
        return buffer if stop is None else self._end(buffer[:start], stop)

    def _end(self, text: str, stop: str) -> str:
        self.matched, self._pending_text = stop, ""
        return text

    def _find(self, buffer: str) -> tuple[int, str | None]:
        """Start of the earliest match and its stop string, the longest of those that start there."""
        best, found = len(buffer), None
        for stop in self._stops:
            start = buffer.find(stop)
            if start != -1 and start < best:
                best, found = start, stop
        return best, found

    def _pending(self, buffer: str) -> int:
        """Start of the longest suffix that is a proper prefix of a stop string.

        Asks each start in the buffer, which is short unless it nearly matches, and not each prefix of each stop.
        """
        for start in range(max(0, len(buffer) - self._max_length + 1), len(buffer)):
            tail = buffer[start:]
            if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stops):
                return start
        return len(buffer)


class PromptEcho:
    """Collects the log-probabilities of the prompt's tokens, if requested."""

    def __init__(self, text: str, ids: tuple[int, ...], tokenizer: Tokenizer, *, is_scored: bool) -> None:
        self.text = text
        self._ids = ids
        self._tokenizer = tokenizer
        self._is_scored = is_scored
        self._scores: list[tuple[float | None, Top]] = [(None, ())]
        self._pieces: list[tuple[str, tuple[TokenDetail, ...]]] = []

    def add(self, scores: PromptScores) -> None:
        """Adds the log-probabilities of the next tokens."""
        self._scores += scores.tokens

    def deltas(self, index: int) -> list[Delta]:
        """The echoed prompt for choice `index`, with the tokens that were scored before the request ended."""
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
        starts = range(0, len(details), _TOKENS_PER_DELTA)
        ends = [min(details[start].offset, len(self.text)) for start in starts]
        bounds = [0, *ends[1:], len(self.text)]
        return [
            (self.text[begin:end], tuple(details[start : start + _TOKENS_PER_DELTA]))
            for start, (begin, end) in zip(starts, pairwise(bounds), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class TextRules:
    """A request's text-level rules: echo, stop strings, log-probabilities."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end the text, and are never shown."""


class OutputChoice:
    """Turns a sequence's token events into text deltas. Emits nothing after `ended` is set."""

    __slots__ = (  # as in TokenStream
        *("index", "echo", "n_tokens", "last_token_at", "logprob_sum", "ended", "_request", "_tokenizer", "_rules"),
        *("_decoder", "_strips_space", "_is_plain", "_matcher", "_base", "_decoded", "_sent", "_pending_tokens"),
    )

    def __init__(
        self, index: int, request: Request, tokenizer: Tokenizer, rules: TextRules, echo: PromptEcho | None = None
    ) -> None:
        self.index = index
        self.echo = echo
        """The prompt, if it must still be sent before the text."""
        self.n_tokens = 0
        self.last_token_at: float | None = None
        """When the engine sampled the last token, in monotonic seconds; None after an interruption. For the session."""
        self.logprob_sum = 0.0
        self.ended: Finished | None = None
        self._request = request
        self._tokenizer = tokenizer
        self._rules = rules
        self._decoder = StreamDecoder()
        # A prompt of special tokens only has no text, so the completion is the start of the text.
        has_no_text = not any(tokenizer.token_bytes(token) for token in request.prompt)
        self._strips_space = has_no_text and tokenizer.strips_first_space
        self._is_plain = not (rules.stops or self._strips_space or echo)
        """Whether the text needs no echo, no stop strings and no change of its start."""
        self._matcher = StopMatcher(rules.stops)
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
            text = self._decoder.feed(self._tokenizer.token_bytes(token))
            return (Delta(self.index, text),) if text else ()
        deltas = self._take_echo()
        text = self._matched(self._decode(event))
        deltas += self._delta(text, final=False)
        if self._matcher.matched is not None:
            deltas += self._end_at_stop(self._matcher.matched)
        elif event.finish:
            deltas += self.finish(str(event.finish), self._stop_reason(event))
        return deltas

    def finish(self, finish_reason: str, stop_reason: str | int | None = None) -> list[Delta]:
        """Finishes the choice now; returns the text that was held back."""
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
        text = self._decoder.feed(data)
        if event.logprob is not None:
            self.logprob_sum += event.logprob
            detail = TokenDetail(event.token, event.logprob, event.top, self._base + first)
            self._pending_tokens.append((self._decoded + len(text), detail))
        self._decoded += len(text)
        return text

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
        self._sent += len(text)
        is_everything = final and self._matcher.matched is None
        ready = []
        while self._pending_tokens:
            end, detail = self._pending_tokens[0]
            first = detail.offset - self._base
            if not (is_everything or (first < self._sent and (final or end <= self._sent))):
                break
            ready.append(detail)
            self._pending_tokens.popleft()
        return [Delta(self.index, text, tuple(ready))] if text or ready else []
