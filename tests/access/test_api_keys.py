"""Keys files that cannot be read for a while, and what a killed `keys add` leaves."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.access import api_keys
from app.access.api_keys import ApiKeys, add_key, new_key, read_keys, revoke_key, stored

KEY = new_key()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    add_key(path, stored(KEY, "alice"))
    add_key(path, stored(new_key(), "bob"))
    return path


@pytest.mark.parametrize(("call", "number"), [("open", errno.EMFILE), ("open", errno.EACCES), ("read", errno.EIO)])
def test_key_revoked_while_the_file_cannot_be_read_stops_working(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, number: int
) -> None:
    """A connection flood can take every file descriptor; the file does not change again when it is over."""
    monkeypatch.setattr(api_keys, "_CHECK_SECONDS", 0.0)
    keys = ApiKeys(file)
    assert keys.tenant_of(KEY.encode())
    revoke_key(file, "alice")
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(os, call, _failing(number))
        assert keys.tenant_of(KEY.encode()) and keys.tenant_of(KEY.encode())
    assert [record.message.count("cannot be read") for record in caplog.records] == [1]
    assert keys.tenant_of(KEY.encode()) is None and keys.count == 1


def test_the_same_mistake_made_twice_is_logged_twice(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api_keys, "_CHECK_SECONDS", 0.0)
    keys = ApiKeys(file)
    for content in ("{", "{ "):
        file.write_text(content)
        with caplog.at_level(logging.ERROR):
            assert keys.tenant_of(KEY.encode()) and keys.tenant_of(KEY.encode())
    assert [record.message.count("stay in force") for record in caplog.records] == [1, 1]


def test_file_of_a_killed_command_does_not_prevent_the_next(file: Path) -> None:
    """In a container, commands have the same process id again and again."""
    for name in (f".keys.json.{os.getpid()}.tmp", ".keys.json.tmp"):
        (file.parent / name).write_text("half")
    add_key(file, stored(new_key(), "carol"))
    assert [key.name for key in read_keys(file)] == ["alice", "bob", "carol"]
    assert not (file.parent / ".keys.json.tmp").exists()


def _failing(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail
