"""One version of a weights directory, as a value: where each of its files is read, whatever the directory has become.

The functions that read weights take a directory, either as a path or as such a version. Both name their files by `/`.
Errors name the files as the user knows them, wherever they are read.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

_log = logging.getLogger("inkstream")


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A file of a version: `path` is its name for errors, `opened` the path to read, None if there is no such file."""

    path: Path
    opened: Path | None

    @property
    def name(self) -> str:
        """Name of the file in its directory."""
        return self.path.name

    def __str__(self) -> str:
        return str(self.path)


class WeightsVersion(Struct, frozen=True, kw_only=True):
    """The files of a weights directory at one time. The process that keeps them hands the value to other processes."""

    directory: str
    """Path of the weights directory, as the user gave it."""
    files: dict[str, str] = {}
    """Name -> path to read, such as /proc/PID/fd/N; empty for a file that is read in the directory itself."""
    hashes: dict[str, str] = {}
    """Name -> SHA-256 of a file that its keeper has read whole from that path."""

    @property
    def path(self) -> Path:
        """The weights directory."""
        return Path(self.directory)

    @property
    def name(self) -> str:
        """Name of the weights directory."""
        return self.path.name

    def with_hashes(self, hashes: dict[str, str]) -> WeightsVersion:
        """The same files, which their keeper has read whole."""
        return msgspec.structs.replace(self, hashes=hashes)

    def __truediv__(self, name: str) -> Path | WeightsFile:
        opened = self.files.get(name)
        return self.path / name if opened == "" else WeightsFile(self.path / name, Path(opened) if opened else None)

    def __str__(self) -> str:
        return self.directory


Directory = Path | WeightsVersion
"""A weights directory: as it is, or one version of it."""
File = Path | WeightsFile
"""A file of a weights directory."""


def path_of(directory: Directory) -> Path:
    """Path of the weights directory."""
    return directory.path if isinstance(directory, WeightsVersion) else directory


def encode_directory(directory: Directory) -> str:
    """The directory as an argument of a process."""
    version = directory if isinstance(directory, WeightsVersion) else WeightsVersion(directory=str(directory))
    return msgspec.json.encode(version).decode()


def decode_directory(argument: str) -> Directory:
    """The directory of encode_directory(), for this process."""
    return readable(msgspec.json.decode(argument, type=WeightsVersion))


def readable(version: WeightsVersion) -> Directory:
    """The version if this process may read its files; otherwise the directory as it is, with a warning."""
    if unreadable := next((path for path in version.files.values() if path and not os.access(path, os.R_OK)), None):
        _log.warning("cannot read %s in this process; reading the files from %s instead", unreadable, version)
    return version if version.files and not unreadable else version.path
