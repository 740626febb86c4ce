"""Check runner of the client scripts: runs the checks one by one and prints a line for each.

Standard library only: it runs in every client's environment.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def run_checks(namespace: Mapping[str, Any]) -> None:
    """Runs every function named check_...; ends the process with status 1 if one failed."""
    failed = 0
    for name, check in namespace.items():
        if name.startswith("check_"):
            failed += not _passes(name.removeprefix("check_").replace("_", " "), check)
    sys.exit(failed > 0)


@contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[list[Any]]:
    """Asserts that the block raises `kind` with all `words` in its text; yields a list that receives the exception."""
    caught: list[Any] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    assert caught, f"no {kind.__name__} was raised"
    missing = [word for word in words if word not in str(caught[0])]
    assert not missing, f"{missing} not in {caught[0]}"


def _passes(title: str, check: Any) -> bool:
    started = time.monotonic()
    try:
        asyncio.run(check()) if inspect.iscoroutinefunction(check) else check()
    except Exception:
        print(f"FAIL {title}\n{traceback.format_exc()}", flush=True)
        return False
    print(f"ok   {title} ({time.monotonic() - started:.2f} s)", flush=True)
    return True
