"""What a directory of weights looks like from outside, so that a change is seen. Reads no weights but to hash them.

Names, places on disk, sizes and times of its files, and where it is: a link that leads elsewhere is a change, too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from model.checkpoint.layout_check import check_layout
from model.checkpoint.manifest import check_manifest

_IGNORED = ("README.md",)


@dataclass(frozen=True, slots=True)
class WeightsFingerprint:
    """Equal looks mean that nothing was replaced between them."""

    place: str
    """The directory without links."""
    files: tuple[tuple[str, int, int, int], ...]
    """Name, inode, bytes, nanoseconds of the last change; by name. Empty where the directory cannot be read."""


def look(weights: Path) -> WeightsFingerprint:
    """As the directory is now. Hidden files are somebody's work in progress."""
    place = os.path.realpath(weights)
    files = []
    try:
        with os.scandir(place) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and entry.name not in _IGNORED:
                    facts = os.stat(entry.path)  # noqa: PTH116 (of what a link leads to, as the loader reads it)
                    files.append((entry.name, facts.st_ino, facts.st_size, facts.st_mtime_ns))
    except OSError:
        return WeightsFingerprint(place, ())
    return WeightsFingerprint(place, tuple(sorted(files)))


def what_is_missing(weights: Path) -> str:
    """Why the files there are no whole set yet; empty where nothing speaks against it."""
    try:
        check_layout(weights)
        check_manifest(weights)
    except ValueError as error:
        return str(error)
    return ""


def without_links(weights: Path) -> Path:
    """Where the weights are now, whatever a link on the way leads to later; as it was given where there is none."""
    real = weights.resolve()
    return weights if real == Path(os.path.abspath(weights)) else real  # noqa: PTH100 (resolve() follows links)
