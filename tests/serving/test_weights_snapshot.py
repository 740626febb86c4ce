"""A snapshot of opened weights stays readable when the directory changes: in this process and in others."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.serving.weights_snapshot import WeightsSnapshot
from model.checkpoint.config_file import load_config
from model.checkpoint.tensor_index import check_layout, find_tensors
from model.files import CheckpointError, entry_exists, read_json, reading_from, regular_file, sha256
from model.tokenizer.tokenizer import Tokenizer
from tests.support.armed_faults import arm_this_process


@pytest.fixture
def directory(tmp_path: Path, weights: Path) -> Path:
    """Weights that a test may damage."""
    return Path(shutil.copytree(weights, tmp_path / "weights"))


@pytest.fixture
def snapshot(directory: Path, tmp_path: Path) -> Iterator[WeightsSnapshot]:
    """A snapshot of these weights with a private copy."""
    snapshot = WeightsSnapshot.open(directory)
    snapshot.copy([tmp_path])
    yield snapshot
    snapshot.close()


def _hashes(directory: Path) -> dict[str, str]:
    check_layout(directory)
    load_config(directory)
    Tokenizer.load(directory)
    return {path.name: sha256(path) for path in find_tensors(directory).paths}


def _overwrite(directory: Path) -> None:
    for path in directory.iterdir():
        path.write_text("{}")


def _truncate(directory: Path) -> None:
    for path in directory.iterdir():
        os.truncate(path, 10)


def _replace_files(directory: Path) -> None:
    for path in list(directory.iterdir()):
        path.with_suffix(".new").write_text("{}")
        path.with_suffix(".new").replace(path)


def _unlink(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


def _move_away(directory: Path) -> None:
    directory.rename(directory.with_name("old"))
    directory.mkdir()


def _switch_link(directory: Path) -> None:
    directory.rename(directory.with_name("old"))
    directory.symlink_to("/usr")


SPOILED: list[Callable[[Path], None]] = [_overwrite, _truncate, _replace_files, _unlink, _move_away, _switch_link]
WITHOUT_COPIES = list(zip(SPOILED[2:], ([], ["missing"], [], ["missing"]), strict=True))
"""Descriptors alone outlive all but writes to the same file."""


@pytest.mark.parametrize(("spoil", "folders"), [*((spoil, ["missing", "."]) for spoil in SPOILED), *WITHOUT_COPIES])
def test_snapshot_reads_the_opened_files_whatever_happens_to_the_directory(
    directory: Path, tmp_path: Path, spoil: Callable[[Path], None], folders: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    snapshot, before = WeightsSnapshot.open(directory), _hashes(directory)
    snapshot.copy([tmp_path / folder for folder in folders])
    assert ("no private copy" in caplog.text) == ("." not in folders)
    spoil(directory)
    with snapshot.reading():
        assert _hashes(directory) == before
    with pytest.raises(ValueError, match=re.escape(str(directory))):
        _hashes(directory)
    snapshot.close()


def test_another_process_reads_the_snapshot_and_errors_name_the_directory(
    directory: Path, snapshot: WeightsSnapshot
) -> None:
    program = (
        "import json, sys; from pathlib import Path; from model.files import reading_from; "
        "from model.files import read_json\n"
        "with reading_from(Path(sys.argv[1]), json.loads(sys.argv[2])): read_json(Path(sys.argv[1]) / sys.argv[3])"
    )
    _overwrite(directory)

    def read(name: str) -> str:
        command = [sys.executable, "-c", program, str(directory), json.dumps(dict(snapshot.files)), name]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    assert read("config.json") == ""
    assert f"{directory}/nothing.json: cannot be read (No such file or directory)" in read("nothing.json")
    assert f"{directory}/model.safetensors: not JSON" in read("model.safetensors")


def test_later_files_are_not_in_the_snapshot(directory: Path, snapshot: WeightsSnapshot) -> None:
    (directory / "golden.json").write_text("{}")
    with snapshot.reading():
        assert not entry_exists(directory / "golden.json") and entry_exists(directory / "config.json")
        assert read_json(directory / "golden.json", optional=True) == {}
        with pytest.raises(CheckpointError, match=r"golden\.json: cannot be read"):
            regular_file(directory / "golden.json")
    assert entry_exists(directory / "golden.json")


def test_snapshot_refuses_what_the_loader_refuses(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.json").write_text("{}")
    (directory / "golden.json").symlink_to(tmp_path / "outside.json")
    os.mkfifo(directory / "chat_template.jinja")
    snapshot = WeightsSnapshot.open(directory)
    snapshot.copy([tmp_path])
    with snapshot.reading():
        with pytest.raises(CheckpointError, match=r"golden\.json: leads out of the directory"):
            read_json(directory / "golden.json")
        with pytest.raises(CheckpointError, match=r"chat_template\.jinja: is not a regular file"):
            regular_file(directory / "chat_template.jinja")
    snapshot.close()


def test_other_directories_are_read_directly(directory: Path, snapshot: WeightsSnapshot, weights: Path) -> None:
    _overwrite(directory)
    with snapshot.reading():
        assert sha256(weights / "config.json") == sha256(directory / "config.json")
        assert regular_file(weights / "config.json") == weights / "config.json"


def test_copies_leave_no_file_name_and_no_descriptor(directory: Path, tmp_path: Path) -> None:
    names, before = sorted(tmp_path.rglob("*")), len(list(Path("/proc/self/fd").iterdir()))
    snapshot = WeightsSnapshot.open(directory)
    snapshot.copy([tmp_path])
    assert sorted(tmp_path.rglob("*")) == names
    snapshot.close()
    snapshot.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_full_disk_is_logged_and_the_originals_are_used(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = arm_this_process(tmp_path / "faults", monkeypatch)
    faults.arm("weights.copy", "disk full", after=2)
    snapshot, before = WeightsSnapshot.open(directory), _hashes(directory)
    snapshot.copy([tmp_path])
    assert "no private copy of" in caplog.text and "model.safetensors (No space left on device)" in caplog.text
    _replace_files(directory)
    with snapshot.reading():
        assert _hashes(directory) == before
    snapshot.close()


def test_file_systems_in_memory_take_less_than_disks(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        pytest.skip("there is no file system in memory")
    (directory / "large.safetensors").touch()
    os.truncate(directory / "large.safetensors", 25 << 20)
    for folders, refused in (([memory], True), ([memory, tmp_path], False)):
        caplog.clear()
        snapshot = WeightsSnapshot.open(directory)
        snapshot.copy(folders)
        assert ("large.safetensors (more than 24 MiB for /dev/shm)" in caplog.text) == refused
        snapshot.close()


def test_unreadable_snapshot_falls_back_to_the_directory(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with reading_from(directory, {"config.json": "/proc/1/fd/9999"}):
        assert entry_exists(directory / "model.safetensors") and read_json(directory / "config.json")
    assert "cannot read" in caplog.text
