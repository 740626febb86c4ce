"""Compact table of tokens with log-probabilities: arrays take a tenth of the memory of objects."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from app.generation.request import TokenDetail


class TokenTable:
    """An append-only list of TokenDetail."""

    def __init__(self, details: Iterable[TokenDetail] = ()) -> None:
        self._ids = _Numbers()
        self._has_logprob = bytearray()
        self._logprobs = Floats()
        self._offsets = _Numbers()
        self._top_counts = bytearray()
        self._top_ids = _Numbers()
        self._top_logprobs = Floats()
        self.extend(details)

    def extend(self, details: Iterable[TokenDetail]) -> None:
        """Appends all of `details`."""
        for detail in details:
            self._ids.append(detail.id)
            self._has_logprob.append(detail.logprob is not None)
            self._logprobs.append(detail.logprob or 0.0)
            self._offsets.append(detail.offset)
            self._top_counts.append(len(detail.top))
            for token, logprob in detail.top:
                self._top_ids.append(token)
                self._top_logprobs.append(logprob)

    def __len__(self) -> int:
        return len(self._ids.values)

    def __iter__(self) -> Iterator[TokenDetail]:
        tops = self._tops()
        for token, logprob, offset in zip(self._ids.values, self.logprobs, self._offsets.values, strict=True):
            yield TokenDetail(token, logprob, next(tops), offset)

    @property
    def ids(self) -> array[int]:
        """The ids of all tokens."""
        return self._ids.values

    @property
    def logprobs(self) -> Iterator[float | None]:
        """Each token's log-probability; None for the first of a prompt."""
        values = self._logprobs.values
        return (value if known else None for value, known in zip(values, self._has_logprob, strict=True))

    def _tops(self) -> Iterator[tuple[tuple[int, float], ...]]:
        end = 0
        for count in self._top_counts:
            begin, end = end, end + count
            yield tuple(zip(self._top_ids.values[begin:end], self._top_logprobs.values[begin:end], strict=True))


class _Numbers:
    """Unsigned integers of 16 bits while all of them fit, otherwise of 32."""

    def __init__(self) -> None:
        self.values = array("H")

    def append(self, value: int) -> None:
        """Adds one at the end."""
        try:
            self.values.append(value)
        except OverflowError:
            self.values = array("I", self.values)
            self.values.append(value)


class Floats:
    """Floats in 32 bits while all of them are exact, as the engine's are, otherwise in 64."""

    def __init__(self) -> None:
        self.values = array("f")

    def append(self, value: float) -> None:
        """Adds one at the end."""
        self.values.append(value)
        if self.values.typecode == "f" and self.values[-1] != value:
            self.values = array("d", self.values)
            self.values[-1] = value
