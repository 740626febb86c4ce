"""The cache directory: where it is, who may write it, and one writer at a time."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from time import sleep

import pytest

from app.common.cache_directory import CacheError, build_directory, cache_directory, is_trusted_directory


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "inkstream"


def test_cache_directories_are_not_writable_by_others(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        for directory in (tmp_path / "cache" / "packed", tmp_path / "cache"):
            with build_directory(directory):
                assert is_trusted_directory(directory)
    finally:
        os.umask(before)


def test_wait_for_another_build_is_logged(cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A suspended `inkstream compile` holds the lock until it is continued or ended."""
    caplog.set_level(logging.INFO)
    entered = threading.Event()

    def second() -> None:
        with build_directory(cache_dir):
            entered.set()

    thread = threading.Thread(target=second)
    with build_directory(cache_dir):
        thread.start()
        while not caplog.messages and thread.is_alive():
            sleep(0.01)
        assert not entered.is_set()
    thread.join(timeout=60)
    assert entered.is_set()
    assert caplog.messages == [f"waiting for another process of inkstream that writes to {cache_dir}"]


def test_file_system_without_locks_stores_nothing(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    refusal = pytest.raises(CacheError, match=r"cannot be stored in .* \(No locks available\): .* --cache-dir$")
    with refusal, build_directory(cache_dir):
        pytest.fail("two builds could run at once")
    assert {path.name for path in cache_dir.iterdir()} == {".lock"}


def test_cache_directory_follows_option_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"INKSTREAM_CACHE_DIR": "/named", "XDG_CACHE_HOME": "/xdg"}
    assert cache_directory(tmp_path, named) == tmp_path
    assert cache_directory(None, named) == Path("/named")
    assert cache_directory(None, {**named, "INKSTREAM_CACHE_DIR": ""}) == Path("/xdg/inkstream")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory(None, {"XDG_CACHE_HOME": "not/absolute"}) == tmp_path / ".cache/inkstream"
    assert cache_directory(None, {}) == tmp_path / ".cache/inkstream"


def test_wait_for_another_build_may_be_limited(cache_dir: Path) -> None:
    with build_directory(cache_dir):
        refusal = pytest.raises(CacheError, match=r"weights cannot be stored in .* holds the lock\): .* --cache-dir$")
        with refusal, build_directory(cache_dir, "weights", wait_seconds=0.05):
            pytest.fail("two builds could run at once")
    with build_directory(cache_dir, "weights", wait_seconds=0.05):
        pass
