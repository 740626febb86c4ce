"""Server-sent events as they come from a replica: bytes to frames. Knows what no event means."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Frame:
    """One event, or a comment, which has no name."""

    name: str
    data: bytes
    """One line of JSON; of a comment, its line."""


class FrameReader:
    """For one answer."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are whole now."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        return [_frame(block) for block in blocks]


def _frame(block: bytes) -> Frame:
    if block.startswith(b":"):
        return Frame("", block)
    fields = dict(line.partition(b": ")[::2] for line in block.split(b"\n"))
    return Frame(fields.get(b"event", b"").decode("ascii"), fields.get(b"data", b""))
