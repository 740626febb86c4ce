"""Token bytes to text that can be sent: half characters and half stop strings wait."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class StreamDecoder:
    """Bytes in, whole characters out; bytes that are no UTF-8 become U+FFFD. Each byte is decoded once."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_whole = True  # nothing unfinished waits

    def feed(self, data: bytes) -> str:
        """The characters that `data` completes."""
        if self._is_whole and data.isascii():  # nearly all tokens, at half the price
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self._is_whole = not self._decoder.getstate()[0]
        return text

    def broken_by(self, data: bytes) -> int:
        """Characters that an unfinished one becomes where `data` does not go on with it; they stand before its own."""
        pending = self._decoder.getstate()[0]
        goes_on = not data or 0x80 <= data[0] < 0xC0
        return 0 if goes_on else len(pending.decode("utf-8", "replace"))

    def flush(self) -> str:
        """What an unfinished character at the end becomes: one U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Text in, text out up to the first stop string, wherever the pieces are cut.

    The earliest start wins, ties go to the longest. Held back is only what may still be part of a stop; once `matched`
    is set, nothing more comes out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> str:
        """The part of the text that can be sent now."""
        if self.matched is not None:
            return ""
        buffer = self._held + text
        start, stop = self._find(buffer)
        pending = self._pending(buffer)
        if stop is not None and start < pending:
            return self._end(buffer[:start], stop)
        # An earlier or a longer match may still come to its end.
        self._held = buffer[pending:]
        return buffer[:pending]

    def flush(self) -> str:
        """The end of the text has come: what was held back, or what stands before a match in it."""
        if self.matched is not None:
            return ""
        buffer, self._held = self._held, ""
        start, stop = self._find(buffer)
        return buffer if stop is None else self._end(buffer[:start], stop)

    def _end(self, text: str, stop: str) -> str:
        self.matched, self._held = stop, ""
        return text

    def _find(self, buffer: str) -> tuple[int, str | None]:
        """Where the earliest stop starts, and which; the longest of those that start there."""
        best, found = len(buffer), None
        for stop in self._stops:
            place = buffer.find(stop, 0, best + len(stop) - 1 if found else len(buffer))
            if place != -1 and place < best:
                best, found = place, stop
        return best, found

    def _pending(self, buffer: str) -> int:
        """Where the longest suffix begins that is a proper prefix of a stop."""
        for place in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            tail = buffer[place:]
            if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stops):
                return place
        return len(buffer)
