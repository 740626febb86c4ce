"""The state of an unfinished training run on disk: weights, optimiser, position. Newest good one wins.

A snapshot is a folder, complete before it gets its name, so that a crash at any moment leaves the one before.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from model.files import CheckpointError, sync_directory, write_files
from model.train.position import Position, parse_position
from model.train.progress import say

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
