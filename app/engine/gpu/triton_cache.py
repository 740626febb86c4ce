"""Places Triton's cache of compiled kernels next to our own, so that there is one directory to keep.

Triton reads the variable when it compiles, and its children inherit it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

from app.engine.cpu.toolchain.library_cache import cache_directory

VARIABLE = "TRITON_CACHE_DIR"


def keep_triton_cache(asked: Path | None, environment: MutableMapping[str, str]) -> None:
    """Says where in `environment`; what a user has said there stays. `asked`: --cache-dir.

    Where there is no home directory either, Triton is left to itself.
    """
    if environment.get(VARIABLE):
        return
    if directory := cache_directory(asked, environment):
        environment[VARIABLE] = str((directory / "triton").absolute())
