"""Permissions of a key file: readable by its user alone, or by the group of a container's secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from app.access.api_keys import KeyFileError, add_key, new_key, read_keys, revoke_key, stored

USER, GROUP = 10001, 10001


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    add_key(path, stored(new_key(), "alice"))
    return path


def _become(monkeypatch: pytest.MonkeyPatch, user: int, group: int, *more: int) -> None:
    """As far as the process can determine."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "getegid", lambda: group)
    monkeypatch.setattr(os, "getgroups", lambda: list(more))


@pytest.mark.parametrize("mode", [0o440, 0o640, 0o400, 0o600])
def test_a_secret_that_was_handed_to_our_group_is_taken(file: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    file.chmod(mode)
    owner = file.stat()
    for groups in ([owner.st_gid], [GROUP + 1, GROUP + 2, owner.st_gid]):
        _become(monkeypatch, owner.st_uid + USER, *groups)
        assert [key.name for key in read_keys(file)] == ["alice"]


def test_what_is_ours_must_be_ours_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.chmod(0o440)
    status = os.fstat
    monkeypatch.setattr(os, "fstat", lambda descriptor: _owned_by(status(descriptor), USER, GROUP))
    _become(monkeypatch, USER, GROUP)
    with pytest.raises(KeyFileError, match="can be read by others: chmod 600"):
        read_keys(file)


def test_a_group_of_others_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.chmod(0o440)
    owner = file.stat()
    _become(monkeypatch, owner.st_uid + USER, owner.st_gid + GROUP)
    with pytest.raises(KeyFileError, match="can be read by others"):
        read_keys(file)


@pytest.mark.parametrize("mode", [0o604, 0o444, 0o644, 0o460, 0o620, 0o650, 0o601, 0o777])
def test_nothing_else_may_be_open(file: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    file.chmod(mode)
    owner = file.stat()
    for user in (owner.st_uid, owner.st_uid + USER, 0):
        _become(monkeypatch, user, owner.st_gid)
        with pytest.raises(KeyFileError, match="can be read by others"):
            read_keys(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_who_could_read_it_can_after_a_change(file: Path) -> None:
    os.chown(file, 0, GROUP)
    file.chmod(0o440)
    add_key(file, stored(new_key(), "bob"))
    revoke_key(file, "alice")
    after = file.stat()
    assert (after.st_uid, after.st_gid, stat.S_IMODE(after.st_mode)) == (0, GROUP, 0o640)
    os.chown(file, USER, GROUP)
    file.chmod(0o600)
    add_key(file, stored(new_key(), "alice"))
    after = file.stat()
    assert (after.st_uid, after.st_gid, stat.S_IMODE(after.st_mode)) == (USER, GROUP, 0o600)


def _owned_by(status: os.stat_result, user: int, group: int) -> os.stat_result:
    return os.stat_result((*status[:4], user, group, *status[6:]))
