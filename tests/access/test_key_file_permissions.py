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


PROCESSES = {  # effective user, groups, and whether a file that its group can read is accepted
    "owner": (USER, [GROUP], False),
    "member of the group": (USER + 1, [GROUP], True),
    "member of several groups": (USER + 1, [GROUP + 1, GROUP + 2, GROUP], True),
    "member of another group": (USER + 1, [GROUP + 1], False),
    "root": (0, [0], True),
}
MODES = (0o400, 0o600, 0o440, 0o640, 0o604, 0o444, 0o644, 0o460, 0o620, 0o650, 0o601, 0o777)


@pytest.mark.parametrize("mode", MODES, ids=oct)
@pytest.mark.parametrize("process", PROCESSES)
def test_key_file_must_be_private_or_a_secret_of_the_process_group(
    file: Path, monkeypatch: pytest.MonkeyPatch, process: str, mode: int
) -> None:
    user, (group, *more), may_use_secrets = PROCESSES[process]
    file.chmod(mode)
    status = os.fstat
    monkeypatch.setattr(os, "fstat", lambda descriptor: _owned_by(status(descriptor), USER, GROUP))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "getegid", lambda: group)
    monkeypatch.setattr(os, "getgroups", lambda: more)
    open_to = mode & 0o077
    if open_to == 0 or (open_to == 0o040 and may_use_secrets):
        assert [key.name for key in read_keys(file)] == ["alice"]
    else:
        with pytest.raises(KeyFileError, match="can be read by others: chmod 600"):
            read_keys(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a file")
def test_changing_a_key_file_keeps_owner_and_group(file: Path) -> None:
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
