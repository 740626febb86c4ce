"""Where an unfinished run stands, and what must be the same when it goes on. Knows no tensors and no files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from model.files import CheckpointError

FORMAT = 2
_SINCE_FORMAT_1 = {"--schedule": "linear", "--warm-up": "100", "--warm-down": "0.4", "--ema": "0.0"}
"""What every run had before there were flags for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The part of a snapshot that is no tensor."""

    step: int
    seconds: float
    """Time spent training so far."""
    digest: str
    """Corpus.digest."""
    shape: str
    """repr of the ModelConfig."""
    flags: dict[str, str]
    """Flag -> value: all that decides what a step sees and does with it. Must be the same."""
    rounding: dict[str, str] = field(default_factory=dict)
    """What decides only in which order numbers are added up. May change; the bits of the weights then do."""
    limits: dict[str, str] = field(default_factory=dict)
    """How long the run was to be. May change; the schedule then follows the new length."""
    best_step: int = 0
    best_bits: float | None = None
    """Of the best weights measured so far."""

    def must_be_of(self, other: Position, folder: Path) -> None:
        """Whether both are of one run. Raises CheckpointError that says what differs."""
        if self.shape != other.shape:
            fields = _fields(self.shape).items() - _fields(other.shape).items()
            had = ", ".join(f"{name} {value}" for name, value in sorted(fields))
            raise CheckpointError(f"the run in {folder} has another shape ({had}); give the same flags or --overwrite")
        if self.digest != other.digest:
            raise CheckpointError(f"the run in {folder} was started on other data; give the same data or --overwrite")
        if changed := _changed(self.flags, other.flags):
            raise CheckpointError(f"the run in {folder} had {' '.join(changed)}; give the same or --overwrite")

    def notes(self, other: Position) -> list[str]:
        """What may differ, and does, in a sentence each. other: how the run goes on."""
        found = []
        if changed := _changed(self.limits, other.limits) or _changed(other.limits, self.limits):
            now = " ".join(f"{name} {value}" for name, value in other.limits.items())
            found.append(f"the run had {' '.join(changed)}; it ends with {now} now, and its schedule follows")
        if changed := _changed(self.rounding, other.rounding):
            found.append(f"the run had {', '.join(changed)}: it goes on the same up to rounding, not bit for bit")
        return found

    def as_json(self) -> bytes:
        """For position.json."""
        return json.dumps({"format": FORMAT} | asdict(self)).encode()


def parse_position(content: str, path: Path) -> Position:
    """The inverse of as_json(), of older formats too.

    Raises ValueError where it is damaged, and CheckpointError where it is whole, but nothing that this version knows.
    """
    raw: dict[str, Any] = json.loads(content)
    number = raw.pop("format", 1)
    if number not in (1, FORMAT):
        raise CheckpointError(
            f"{path} has format {number}, and this version knows 1 to {FORMAT}: go on with the version that wrote it, "
            "or start anew with --overwrite"
        )
    if number == 1:
        raw["flags"] = _SINCE_FORMAT_1 | raw["flags"]
    try:
        return Position(**raw)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What stood there before and does not now: name and old value."""
    return [f"{name} {value}" for name, value in before.items() if value != now.get(name)]


def _fields(shape: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in shape.partition("(")[2].rstrip(")").split(", "))
    return {name: value for name, _, value in pairs}
