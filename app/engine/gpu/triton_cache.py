"""Chooses the directory in which Triton keeps its compiled kernels."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from app.common.cache_directory import cache_directory, is_trusted_directory

_log = logging.getLogger("inkstream")
_TRITON_CACHE_VARIABLE = "TRITON_CACHE_DIR"


def keep_triton_cache(cache_dir: Path | None, environment: MutableMapping[str, str]) -> None:
    """Sets Triton's cache directory in `environment`, unless the user has set it. `cache_dir`: --cache-dir.

    Without --cache-dir and without a home directory, Triton uses its default. Where other users can write ours, it uses
    its default in the home directory, or a new temporary one, because it loads the libraries that it finds.
    """
    directory = cache_directory(cache_dir, environment)
    if environment.get(_TRITON_CACHE_VARIABLE) or directory is None:
        return
    folder = directory / "triton"
    for each in (directory, folder):
        if each.exists() and not is_trusted_directory(each):
            _log.warning(
                "%s belongs to another user or is writable by others, and Triton keeps its kernels elsewhere: "
                "run chmod go-w on it, or give another directory with --cache-dir",
                each,
            )
            home = Path(environment.get("HOME") or "/nonexistent")
            if not (os.access(home, os.W_OK) and is_trusted_directory(home)):
                environment[_TRITON_CACHE_VARIABLE] = tempfile.mkdtemp(prefix="inkstream-triton-")
            return
    environment[_TRITON_CACHE_VARIABLE] = str(folder.absolute())
