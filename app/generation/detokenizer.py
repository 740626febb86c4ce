"""Incremental detokenizer and stop string matcher."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class StreamDecoder:
    """Incremental UTF-8 decoder that emits whole characters; invalid bytes become U+FFFD. Decodes each byte once."""

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
            start = buffer.find(stop, 0, best + len(stop) - 1 if found else len(buffer))
            if start != -1 and start < best:
                best, found = start, stop
        return best, found

    def _pending(self, buffer: str) -> int:
        """Start of the longest suffix that is a proper prefix of a stop string."""
        for start in range(max(0, len(buffer) - self._max_length + 1), len(buffer)):
            tail = buffer[start:]
            if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stops):
                return start
        return len(buffer)
