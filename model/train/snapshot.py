"""The state of an unfinished training run on disk: weights, optimiser, position. Newest good one wins.

A snapshot is a folder, complete before it gets its name, so that a crash at any moment leaves the one before.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from model.files import CheckpointError, sync_directory, write_files


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run stands, and what must not change when it goes on."""

    step: int
    seconds: float
    """Time spent training so far."""
    digest: str
    """Corpus.digest."""
    shape: str
    """repr of the ModelConfig."""
    flags: dict[str, str]
    """Flag -> value: all that decides what a step sees and does with it."""

    def must_be_of(self, other: Position, folder: Path) -> None:
        """Whether both are of one run. Raises CheckpointError that says what differs."""
        if self.shape != other.shape:
            raise CheckpointError(f"the run in {folder} has another shape; give the same flags or --overwrite")
        if self.digest != other.digest:
            raise CheckpointError(f"the run in {folder} was started on other data; give the same data or --overwrite")
        if changed := [f"{name} {value}" for name, value in self.flags.items() if value != other.flags.get(name)]:
            raise CheckpointError(f"the run in {folder} had {' '.join(changed)}; give the same or --overwrite")


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
        position_json = json.dumps(asdict(position)).encode()
        write_files(unfinished, {"state.safetensors": save(contiguous), "position.json": position_json})
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


def load_snapshot(folder: Path) -> tuple[Position, dict[str, Tensor]] | None:
    """The newest readable snapshot below `folder`, or None."""
    for path in _snapshots(folder):
        if (found := _load(path)) is not None:
            return found
        print(f"warning: {path} is damaged and passed over", flush=True)
    return None


def _load(path: Path) -> tuple[Position, dict[str, Tensor]] | None:
    try:
        position = Position(**json.loads((path / "position.json").read_text()))
        return position, load_file(path / "state.safetensors")
    except (OSError, ValueError, TypeError, SafetensorError):
        return None


def _snapshots(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)
