"""Tokenizer files made from GGUF files, kept between starts: those of 262,144 tokens take 4 s of CPU time to make.

<cache directory>/gguf-tokenizers/KEY.json    name -> content; the key is a hash of what they are made from

A cache that cannot be written, or that others can write, is not used.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

from app.common.cache_directory import (
    CacheError,
    build_directory,
    cache_directory,
    is_trusted_directory,
    read_trusted,
    synchronize,
)

_log = logging.getLogger("inkstream")
_FOLDER = "gguf-tokenizers"
_MAX_FILES = 16
_LOCK_SECONDS = 2.0
Files = dict[str, bytes]


class GgufTokenizers:
    """The kept files in one cache directory."""

    def __init__(self, cache_dir: Path | None) -> None:
        """cache_dir: as given with --cache-dir."""
        directory = cache_directory(cache_dir)
        self._folder = directory / _FOLDER if directory else None

    def remember(self, key: str, make: Callable[[], Files]) -> Files:
        """The files of this key: kept ones, or new ones, which are kept if possible."""
        if self._folder is None:
            return make()
        path = self._folder / f"{key}.json"
        if (kept := _read(path)) is not None:
            return kept
        files = make()
        try:
            with build_directory(self._folder, "tokenizers of GGUF files", wait_seconds=_LOCK_SECONDS) as building:
                self._remove_oldest()
                built = building / path.name
                built.write_text(json.dumps({name: content.decode() for name, content in files.items()}))
                built.chmod(0o600)
                synchronize(built)
                built.replace(path)
        except (CacheError, OSError) as error:
            _log.info("the tokenizer is made anew at each start: %s", error)
        return files

    def _remove_oldest(self) -> None:
        assert self._folder
        kept = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in kept[: max(0, len(kept) - _MAX_FILES + 1)]:
            path.unlink(missing_ok=True)


def _read(path: Path) -> Files | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if is_trusted_directory(path.parent):
            return {name: content.encode() for name, content in json.loads(read_trusted(path)).items()}
    return None
