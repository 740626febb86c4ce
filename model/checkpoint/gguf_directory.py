"""A GGUF file in place of a weights directory: as a version whose other files are made from the file's metadata.

find_gguf() tells which files a path stands for. The made files lie in memory on Linux, elsewhere in a temporary folder,
and other processes of this user read them until they are closed: nothing is written to a cache, and a file that
is replaced is read anew by the next reload.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from model.checkpoint.tensor_index import INDEX_FILE, WEIGHTS_FILE
from model.files import CheckpointError
from model.weights_version import Directory, File, WeightsVersion

SUFFIX = ".gguf"
_SERIES = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Names of the files of a series."""
_MAX_NAMES = 8
_MAX_CHOICES = 40
"""Files that an error lists."""


def find_gguf(weights: Path) -> list[Path]:
    """The file, or the files of the series, that a path stands for: a GGUF file, or a folder with one.

    Empty if it is something else. In a folder, safetensors win, and files of a vision part (mmproj) do not count.
    Raises CheckpointError for a folder with several, and for a series with missing files.
    """
    if weights.suffix == SUFFIX and not weights.is_dir():
        return _series(_without_link(weights))
    try:
        names = sorted(path.name for path in weights.iterdir())
    except OSError:
        return []
    if {WEIGHTS_FILE, INDEX_FILE} & set(names):
        return []
    files = [name for name in names if is_model_file(name)]
    if not files:
        return []
    models = sorted({series_stem(name) for name in files})
    if len(models) > 1:
        shown = ", ".join(files[:_MAX_NAMES]) + (", ..." if len(files) > _MAX_NAMES else "")
        raise CheckpointError(
            f"{weights}: has {len(models)} models ({shown}): give the path of one, such as {files[0]}"
        )
    return _series(weights / files[0])


def gguf_notes(weights: Path) -> list[str]:
    """What a user may not expect of find_gguf(), in a line each."""
    if not weights.is_dir():
        return []
    try:
        names = sorted(path.name for path in weights.iterdir() if path.suffix == SUFFIX)
    except OSError:
        return []
    files = [name for name in names if is_model_file(name)]
    if files and any((weights / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE)):
        return [f"{weights}: its safetensors are used, not {files[0]}; give the path of that file to use it"]
    ignored = [name for name in names if name not in files and not name.startswith(".")]
    return [f"{weights}: {ignored[0]} is left out: only text is served"] if files and ignored else []


def choose_files(names: Collection[str], quantization: str) -> list[str]:
    """The file or series of a repository whose name ends with a quantization. Raises ValueError with the reason only.

    names: paths in the repository. quantization: empty for the only model of the repository.
    """
    stems: dict[str, list[str]] = {}
    for name in sorted(names):
        if is_model_file(name.rpartition("/")[2]):
            stems.setdefault(series_stem(name), []).append(name)
    ending = re.compile(rf"(.*[-._/])?{re.escape(quantization)}", re.IGNORECASE)
    found = [stem for stem in stems if not quantization or ending.fullmatch(stem)]
    if len(found) == 1:
        return stems[found[0]]
    choices = sorted({_quantization(stem) for stem in found or stems})
    if not choices:
        raise ValueError("the repository has no GGUF file")
    shown = ", ".join(choices[:_MAX_CHOICES]) + (", ..." if len(choices) > _MAX_CHOICES else "")
    problem = f"no GGUF file of {quantization}" if quantization and not found else f"{len(found)} GGUF files that fit"
    raise ValueError(f"the repository has {problem}; add one of these after a colon: {shown}")


def _quantization(stem: str) -> str:
    """The end of a name from its quantization on, or the whole name without one."""
    name = stem.rpartition("/")[2]
    found = re.search(r"(?:^|[-._])((?:UD-)?(?:I?Q\d|BF16|F16|F32|MXFP4|TQ\d)[\w-]*)$", name, re.IGNORECASE)
    return found[1] if found else name


def is_model_file(name: str) -> bool:
    """Whether a file of a folder or repository is, by its name, a model or a part of one."""
    return name.endswith(SUFFIX) and not name.startswith(".") and "mmproj" not in name.lower()


def series_stem(name: str) -> str:
    """Name of a model without its suffix, and without the number of a file of a series."""
    found = _SERIES.fullmatch(name)
    return found["stem"] if found else name.removesuffix(SUFFIX)


def _without_link(file: Path) -> Path:
    """Where a link leads, unless that is a cache's blob, which has no suffix."""
    real = Path(os.path.realpath(file)) if file.is_symlink() else file  # resolve() raises for links in a circle
    return real if real.suffix == SUFFIX else file


def _series(file: Path) -> list[Path]:
    found = _SERIES.fullmatch(file.name)
    if not found:
        return [file]
    stem, count = found["stem"], int(found["count"])
    names = [f"{stem}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]
    if file.name not in names:
        raise CheckpointError(f"{file}: its name says that it is a file of a series, but not which one: rename it")
    paths = [file.parent / name for name in names]
    if missing := [path.name for path in paths if not path.exists()]:
        raise CheckpointError(
            f"{file.parent}: the series lacks {missing[0]}: {len(missing)} of {count} files are missing"
        )
    return paths


def made_files(paths: Sequence[File], remember: Any = None, *, with_tokenizer: bool = True) -> dict[str, bytes]:
    """Name -> content of the other files of the weights directory of a model. Raises CheckpointError.

    remember: see make_files().
    """
    # Imported when there is a GGUF file: the model families take a twentieth of a second.
    made: dict[str, bytes] = import_module("model.checkpoint.gguf_files").make_files(
        paths, remember, with_tokenizer=with_tokenizer
    )
    return made


class MadeFiles:
    """Files with given contents, which processes of this user can read by their paths until close()."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self.descriptors: dict[str, int] = {}
        """Name -> descriptor, on Linux."""
        self._folder: Path | None = None
        if sys.platform == "linux":
            self.descriptors = {name: _in_memory(name, content) for name, content in contents.items()}
            self.paths = {name: f"/proc/{os.getpid()}/fd/{number}" for name, number in self.descriptors.items()}
            return
        self._folder = Path(tempfile.mkdtemp(prefix="inkstream-gguf-"))
        for name, content in contents.items():
            (self._folder / name).write_bytes(content)
        self.paths = {name: str(self._folder / name) for name in contents}

    def close(self) -> None:
        """Idempotent."""
        for number in self.descriptors.values():
            os.close(number)
        self.descriptors = {}
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _in_memory(name: str, content: bytes) -> int:
    number = os.memfd_create(name, os.MFD_CLOEXEC)
    with open(number, "wb", closefd=False) as file:
        file.write(content)
    return number


def version_of_gguf(paths: list[Path], made: MadeFiles) -> WeightsVersion:
    """The directory of these files, which are read where they are."""
    files = {path.name: str(path.absolute()) for path in paths}
    return WeightsVersion(directory=str(paths[0].parent), files={**made.paths, **files})


@contextlib.contextmanager
def opened_weights(weights: Path, *, with_tokenizer: bool = True) -> Iterator[Directory]:
    """A path that a user gave, as a directory: itself, or a version for a GGUF file. Raises CheckpointError.

    with_tokenizer: False leaves out the tokenizer and the chat template of a GGUF file, which take longest to make.
    """
    if not (paths := find_gguf(weights)):
        yield weights
        return
    made = MadeFiles(made_files(paths, with_tokenizer=with_tokenizer))
    try:
        yield version_of_gguf(paths, made)
    finally:
        made.close()
