"""The state of an unfinished training run on disk: weights, optimiser, position. The newest valid one is used.

A snapshot is a folder that is renamed once complete, so that a crash at any moment leaves the previous one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from model.files import CheckpointError, sync_directory, write_files
from model.train.common.console import say

FORMAT = 2


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
    """The inverse of as_json().

    Raises CheckpointError where another version wrote it; ValueError, TypeError or AttributeError where it is damaged.
    """
    raw: dict[str, Any] = json.loads(content)
    number = raw.pop("format", 1)
    if number != FORMAT:
        raise CheckpointError(
            f"{path} has format {number}, and this version knows {FORMAT}: go on with the version that wrote it, "
            "or start anew with --overwrite"
        )
    return Position(**raw)


State = tuple[Position, dict[str, Tensor]]


def save_snapshot(folder: Path, position: Position, tensors: dict[str, Tensor]) -> None:
    """Writes step-N below `folder`, then removes older ones. Raises CheckpointError; the older ones then stay."""
    unfinished = folder / f".step-{position.step:08d}"
    finished = folder / unfinished.name[1:]
    if _load(finished) is not None:  # the same step again is the same state
        return
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        for left_by_a_killed_run in folder.glob(".step-*"):
            shutil.rmtree(left_by_a_killed_run, ignore_errors=True)
        write_files(unfinished, {"state.safetensors": save(contiguous), "position.json": position.as_json()})
        shutil.rmtree(finished, ignore_errors=True)
        unfinished.rename(finished)
        sync_directory(folder)
    except OSError as error:
        raise CheckpointError(f"{finished}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    for other in _snapshots(folder):
        if other != finished:
            shutil.rmtree(other, ignore_errors=True)


def remove_snapshots(folder: Path) -> None:
    """Gives up the run in `folder`."""
    for path in _snapshots(folder):
        shutil.rmtree(path)


def newest_snapshot(folder: Path) -> Path | None:
    """The newest one below `folder`, readable or not."""
    return next(iter(_snapshots(folder)), None)


def load_snapshot(folder: Path) -> State | None:
    """The newest readable snapshot below `folder`, or None. Raises CheckpointError where another version wrote it."""
    for path in _snapshots(folder):
        if (found := _load(path)) is not None:
            return found
        say(f"warning: {path} is damaged and passed over")
    return None


def _load(path: Path) -> State | None:
    try:
        position = parse_position((path / "position.json").read_text(), path)
        return position, load_file(path / "state.safetensors")
    except CheckpointError:  # a ValueError too, but one that the user is to hear
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError):
        return None


def _snapshots(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What stood there before and does not now: name and old value."""
    return [f"{name} {value}" for name, value in before.items() if value != now.get(name)]


def _fields(shape: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in shape.partition("(")[2].rstrip(")").split(", "))
    return {name: value for name, _, value in pairs}
