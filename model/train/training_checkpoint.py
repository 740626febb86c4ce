"""Snapshots of an unfinished training run: weights, optimizer state, position. The newest valid one is used.

A snapshot is a folder that is renamed once complete, so that a crash at any time leaves the previous one intact.
"""

from __future__ import annotations

import ast
import contextlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from model.files import CheckpointError, move, write_files
from model.train.reporting.console import print_stdout

FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The non-tensor part of a snapshot."""

    step: int
    seconds: float
    """Time spent training so far."""
    digest: str
    """Corpus.digest."""
    shape: str
    """repr of the ModelConfig."""
    flags: dict[str, str]
    """Flag -> value, for all flags that determine the steps. Must be the same to resume."""
    rounding: dict[str, str] = field(default_factory=dict)
    """Settings that affect only the order of summation. May change; the weights then differ by rounding."""
    limits: dict[str, str] = field(default_factory=dict)
    """Planned length of the run. May change; the schedule then follows the new length."""
    best_step: int = 0
    best_bits: float | None = None
    """Bits per byte of the best weights so far."""

    def require_same_run(self, other: Position, folder: Path) -> None:
        """Raises CheckpointError with the differences unless both positions belong to the same run."""
        if self.shape != other.shape:
            different = _different_fields(self.shape, other.shape)
            raise CheckpointError(f"the run in {folder} has another shape ({different}); pass the same or --overwrite")
        if self.digest != other.digest:
            raise CheckpointError(f"the run in {folder} started with other data; pass the same data or --overwrite")
        if changed := _changed(self.flags, other.flags):
            raise CheckpointError(f"the run in {folder} had {' '.join(changed)}; pass the same or --overwrite")

    def describe_changes(self, other: Position) -> list[str]:
        """One sentence per allowed difference. other: position of the resuming run."""
        changes = []
        if changed := _changed(self.limits, other.limits) or _changed(other.limits, self.limits):
            current = " ".join(f"{name} {value}" for name, value in other.limits.items())
            changes.append(f"the run had {' '.join(changed)}; it ends with {current} now, and its schedule follows")
        if changed := _changed(self.rounding, other.rounding):
            changes.append(f"the run had {', '.join(changed)}: it goes on the same up to rounding, not bit for bit")
        return changes

    def as_json(self) -> bytes:
        """Content of position.json."""
        return json.dumps({"format": FORMAT} | asdict(self)).encode()


State = tuple[Position, dict[str, Tensor]]


def save_snapshot(folder: Path, position: Position, tensors: dict[str, Tensor]) -> None:
    """Writes step-N in `folder`, then removes older snapshots. Raises CheckpointError, and keeps them then."""
    unfinished = folder / f".step-{position.step:08d}"
    finished = folder / unfinished.name[1:]
    if _load(finished) is not None:  # the same step again is the same state
        return
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        for leftover in folder.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        write_files(unfinished, {"state.safetensors": save(contiguous), "position.json": position.as_json()})
        shutil.rmtree(finished, ignore_errors=True)
        move(unfinished, finished)
    except OSError as error:
        raise CheckpointError(f"{finished}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    for other in _snapshots(folder):
        if other != finished:
            shutil.rmtree(other, ignore_errors=True)


def remove_snapshots(folder: Path) -> None:
    """Removes all snapshots of the run in `folder`."""
    for path in _snapshots(folder):
        shutil.rmtree(path)


def newest_snapshot(folder: Path) -> Path | None:
    """The newest snapshot in `folder`, readable or not."""
    return next(iter(_snapshots(folder)), None)


def load_snapshot(folder: Path) -> State | None:
    """Loads the newest readable snapshot in `folder`, or None. Raises CheckpointError if another version wrote it."""
    for path in _snapshots(folder):
        if (state := _load(path)) is not None:
            return state
        print_stdout(f"warning: skipping the damaged snapshot {path}")
    return None


def _load(path: Path) -> State | None:
    """A snapshot; None if it is damaged. Raises CheckpointError if another version wrote it."""
    try:
        raw: dict[str, Any] = json.loads((path / "position.json").read_text())
        if (number := raw.pop("format")) == FORMAT:
            return Position(**raw), load_file(path / "state.safetensors")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError):
        return None
    raise CheckpointError(
        f"{path} has format {number}, but this version supports {FORMAT}: resume with the version that wrote it, "
        "or start over with --overwrite"
    )


def _snapshots(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)


def _different_fields(before: str, current: str) -> str:
    """The fields that differ between two Position.shape, with both values."""
    old, new = _fields(before), _fields(current)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return ", ".join(f"{name} {old.get(name)}, not {new.get(name)}" for name in names)


def _fields(shape: str) -> dict[str, str]:
    """Field -> value of a Position.shape, as text: another version may have had other fields."""
    with contextlib.suppress(SyntaxError, ValueError):
        call = ast.parse(shape, mode="eval").body
        return {str(each.arg): ast.unparse(each.value) for each in call.keywords} if isinstance(call, ast.Call) else {}
    return {}


def _changed(before: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Name and old value of each setting that changed."""
    return [f"{name} {value}" for name, value in before.items() if value != current.get(name)]
