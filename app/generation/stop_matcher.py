"""Stop strings: where they end a text, however it is split, and how they match special tokens, which have no text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from app.common.errors import InvalidRequest

_FIRST_MARK, _MAX_MARKS = 0xD800, 0x800
"""Surrogates: no text has them, because UTF-8 cannot encode them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedStops:
    """Stop strings that name special tokens.

    A mark, which is a character that no text has, stands for such a token: in the text that is searched, and in a
    second form of the stop string. Marks are never sent.
    """

    marks: Mapping[int, str] = field(default_factory=dict)
    """Special token that a stop string names -> its mark."""
    stops: Mapping[str, str] = field(default_factory=dict)
    """Stop string with marks instead of names -> the stop string."""

    @classmethod
    def of(cls, stops: Sequence[str], specials: Mapping[str, int]) -> MarkedStops:
        """The stop strings that contain a name of `specials`, which are the special tokens by name."""
        marks: dict[int, str] = {}
        lengths = sorted({len(name) for name in specials if name}, reverse=True) if stops else []
        starts = {name[0] for name in specials if name} if stops else set()
        marked = {}
        for stop in stops:
            parts, position = [], 0
            while position < len(stop):
                found = _name_at(stop, position, specials, lengths) if stop[position] in starts else None
                parts.append(stop[position] if found is None else _mark(marks, specials[found]))
                position += 1 if found is None else len(found)
            if (text := "".join(parts)) != stop:
                marked[text] = stop
        return cls(marks=marks, stops=marked)


def _name_at(stop: str, position: int, specials: Mapping[str, int], lengths: Sequence[int]) -> str | None:
    """The longest name that starts there."""
    names = (stop[position : position + length] for length in lengths if position + length <= len(stop))
    return next((name for name in names if name in specials), None)


def _mark(marks: dict[int, str], token: int) -> str:
    if token not in marks and len(marks) == _MAX_MARKS:
        raise InvalidRequest(f"stop: names more than {_MAX_MARKS} special tokens: name fewer", "stop")
    return marks.setdefault(token, chr(_FIRST_MARK + len(marks)))


_WITHOUT_MARKS = dict.fromkeys(range(_FIRST_MARK, _FIRST_MARK + _MAX_MARKS))


def without_marks(text: str) -> str:
    """The text that is sent."""
    return text if text.isascii() else text.translate(_WITHOUT_MARKS)


class StopMatcher:
    """Passes text through up to the first stop string, however the text is split into chunks.

    The earliest match wins, and of several the longest. Holds back only text that may still be part of a stop string;
    emits nothing once `matched` is set.
    """

    def __init__(self, stops: Sequence[str], marked: Mapping[str, str] = MappingProxyType({})) -> None:
        """marked: see MarkedStops."""
        self._stops = sorted({*stops, *marked}, key=len, reverse=True) if stops or marked else ()
        self._marked = marked
        self._max_length = len(self._stops[0]) if self._stops else 0
        self._pending_text = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> str:
        """Adds text; returns the part that can be sent now."""
        if not self._stops:
            return text
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
        self.matched, self._pending_text = self._marked.get(stop, stop), ""
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
