"""Counts every write, fsync and rename of Python code, and makes one of them fail: no space, or kill -9.

Patches pathlib, os and shutil, in this process (or its fork) only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

Action = Callable[[], None]


def no_space() -> None:
    """Raises the error of a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def kill() -> None:
    """Kills the process as the kernel's out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


class Operations:
    """Counts operations; runs `action` at number `at`, and at all later ones whose kind is in `then_also`."""

    def __init__(self, action: Action = lambda: None, at: int = -1, then_also: frozenset[str] = frozenset()) -> None:
        self.seen: list[str] = []
        self._action, self._at, self._then_also = action, at, then_also

    def happens(self, kind: str) -> bool:
        """Counts an operation; whether it is to fail."""
        number = len(self.seen)
        self.seen.append(kind)
        return number == self._at or (0 <= self._at < number and kind in self._then_also)

    def do(self, kind: str) -> None:
        """Counts an operation, and runs `action` if it is to fail."""
        if self.happens(kind):
            self._action()

    def write(self, file: Any, content: bytes) -> int:
        """Writes `content`, or half of it if this write is to fail."""
        if self.happens("write"):
            file.write(content[: len(content) // 2])
            file.flush()
            self._action()
        return int(file.write(content))


class _File:
    def __init__(self, file: Any, operations: Operations) -> None:
        self._file, self._operations = file, operations

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, content: bytes) -> int:
        return self._operations.write(self._file, content)


@contextlib.contextmanager
def intercept_writes(operations: Operations) -> Iterator[None]:
    """Routes all changes of the disk through `operations` inside the block."""
    real_open = Path.open

    def open_(path: Path, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if not set(mode) & set("wax+"):
            return real_open(path, mode, *arguments, **named)
        operations.do("open")
        return _File(real_open(path, mode, *arguments, **named), operations)

    def before(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            operations.do(kind)
            return real(*arguments, **named)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Path, "open", open_))
        for owner, name in ((Path, "replace"), (Path, "rename"), (Path, "mkdir"), (os, "fsync"), (os, "link")):
            stack.enter_context(mock.patch.object(owner, name, before(name, getattr(owner, name))))
        stack.enter_context(mock.patch.object(shutil, "rmtree", before("rmtree", shutil.rmtree)))
        yield


SPACE = frozenset({"open", "write", "fsync", "mkdir"})
"""Operations that need space; renaming over an existing file works on a full disk."""
