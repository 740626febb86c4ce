"""manifest.json: the SHA-256 of each file of a weights directory, and the model's name if it has one.

Files are replaced one at a time. The manifest detects an incomplete set, whether a copy, a download, or a training run
was interrupted between two files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from model.files import MODEL_NAME, CheckpointError, entry_exists, read_struct, regular_file, sha256
from model.weights_version import Directory, File

MANIFEST_FILE = "manifest.json"
_NO_HASHES: Mapping[File, str] = {}


class _Name(Struct):
    name: Annotated[str, Meta(pattern=rf"^{MODEL_NAME}\Z")] | None = None


class _Hashes(Struct):
    sha256: dict[
        Annotated[str, Meta(pattern=rf"^(?!{re.escape(MANIFEST_FILE)}\Z)[A-Za-z0-9_][A-Za-z0-9_.-]{{0,250}}\Z")],
        Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")],
    ]


def manifest_file(files: Mapping[str, bytes], model_name: str | None = None) -> bytes:
    """Manifest of these files. files: name -> content."""
    return manifest_of({name: hashlib.sha256(content).hexdigest() for name, content in files.items()}, model_name)


def manifest_of(hashes: Mapping[str, str], model_name: str | None = None) -> bytes:
    """Manifest of files with these hashes. hashes: name -> SHA-256."""
    name = {"name": model_name} if model_name else {}
    return (json.dumps({**name, "sha256": dict(sorted(hashes.items()))}, indent=2) + "\n").encode()


def read_model_name(directory: Directory) -> str | None:
    """The name that the manifest gives the model. Raises CheckpointError for one that clients could not write."""
    return read_struct(directory / MANIFEST_FILE, _Name, optional=True).name


def check_manifest(directory: Directory, known: Mapping[File, str] = _NO_HASHES) -> bool:
    """Whether there is a manifest. Raises CheckpointError if a file is missing or differs from it.

    known: hashes of large files that the caller has just read.
    """
    path = directory / MANIFEST_FILE
    if not entry_exists(path):
        return False
    for name, expected in read_struct(path, _Hashes).sha256.items():
        file = directory / name
        if file not in known:
            regular_file(file)
        if (known.get(file) or sha256(file)) != expected:
            raise CheckpointError(
                f"{file}: differs from {MANIFEST_FILE}: the directory is incomplete or was "
                f"changed by hand (remove {MANIFEST_FILE} if the files are meant to differ from it)"
            )
    return True
