"""A snapshot of opened weights stays readable when the directory changes: in this process and in others."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.common.weights_store import WeightsStore
from app.serving import weights_snapshot
from app.serving.weights_snapshot import WeightsSnapshot
from model.checkpoint.config_file import load_config
from model.checkpoint.tensor_index import check_layout, find_tensors
from model.files import CheckpointError, entry_exists, read_json, regular_file, sha256
from model.tokenizer.tokenizer import Tokenizer
from model.weights_version import Directory, WeightsVersion, encode_directory, readable
from tests.support.armed_faults import arm_this_process


@pytest.fixture
def directory(tmp_path: Path, weights: Path) -> Path:
    """Weights that a test may damage."""
    return Path(shutil.copytree(weights, tmp_path / "weights"))


@pytest.fixture
def snapshot(directory: Path) -> Iterator[WeightsSnapshot]:
    """A snapshot of these weights with a private copy."""
    snapshot = WeightsSnapshot.open(directory)
    snapshot.keep(None)
    yield snapshot
    snapshot.close()


def _hashes(directory: Directory) -> dict[str, str]:
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
Keep = Callable[[WeightsSnapshot, Path, pytest.MonkeyPatch], None]


def _in_memory(snapshot: WeightsSnapshot, _folder: Path, _patch: pytest.MonkeyPatch) -> None:
    snapshot.keep(None)


def _in_store(snapshot: WeightsSnapshot, folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weights_snapshot, "_MAX_IN_MEMORY_BYTES", 0)
    snapshot.keep(WeightsStore(folder, 1 << 30))


def _in_a_store_that_is_removed(snapshot: WeightsSnapshot, folder: Path, patch: pytest.MonkeyPatch) -> None:
    _in_store(snapshot, folder, patch)
    shutil.rmtree(folder, ignore_errors=True)


def _opened_only(snapshot: WeightsSnapshot, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """No store: descriptors alone outlive all but writes to the same file."""
    patch.setattr(weights_snapshot, "_MAX_IN_MEMORY_BYTES", 0)
    (folder.parent / "file").write_text("")
    snapshot.keep(WeightsStore(folder.parent / "file" / "store", 1 << 30))


KEPT: list[tuple[Callable[[Path], None], Keep]] = [
    *((spoil, keep) for spoil in SPOILED for keep in (_in_memory, _in_store, _in_a_store_that_is_removed)),
    *((spoil, _opened_only) for spoil in SPOILED[2:]),
]


@pytest.mark.parametrize(("spoil", "keep"), KEPT)
def test_snapshot_reads_the_opened_files_whatever_happens_to_the_directory(
    directory: Path,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    keep: Keep,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshot, before = WeightsSnapshot.open(directory), _hashes(directory)
    keep(snapshot, tmp_path / "store", monkeypatch)
    assert ("no private copy" in caplog.text) == (keep is _opened_only)
    spoil(directory)
    assert _hashes(snapshot.directory) == before
    with pytest.raises(ValueError, match=re.escape(str(directory))):
        _hashes(directory)
    snapshot.close()


@pytest.mark.parametrize("spoil", SPOILED[:2])
def test_opened_files_alone_do_not_outlive_writes(
    directory: Path, tmp_path: Path, spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without copies, the same writes change what the snapshot reads."""
    snapshot = WeightsSnapshot.open(directory)
    _opened_only(snapshot, tmp_path / "store", monkeypatch)
    spoil(directory)
    with pytest.raises(ValueError, match=re.escape(str(directory))):
        _hashes(snapshot.directory)
    snapshot.close()


def test_another_process_reads_the_snapshot_and_errors_name_the_directory(
    directory: Path, snapshot: WeightsSnapshot
) -> None:
    program = (
        "import sys; from model.files import read_json; from model.weights_version import decode_directory\n"
        "read_json(decode_directory(sys.argv[1]) / sys.argv[2])"
    )
    _overwrite(directory)

    def read(name: str) -> str:
        command = [sys.executable, "-c", program, encode_directory(snapshot.directory), name]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    assert read("config.json") == ""
    assert f"{directory}/nothing.json: cannot be read (No such file or directory)" in read("nothing.json")
    assert f"{directory}/model.safetensors: not JSON" in read("model.safetensors")


def test_later_files_are_not_in_the_snapshot(directory: Path, snapshot: WeightsSnapshot) -> None:
    (directory / "added.json").write_text("{}")
    kept = snapshot.directory
    assert not entry_exists(kept / "added.json") and entry_exists(kept / "config.json")
    assert read_json(kept / "added.json", optional=True) == {}
    with pytest.raises(CheckpointError, match=r"added\.json: cannot be read"):
        regular_file(kept / "added.json")
    assert entry_exists(directory / "added.json")


def test_snapshot_refuses_what_the_loader_refuses(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.json").write_text("{}")
    (directory / "golden.json").symlink_to(tmp_path / "outside.json")
    os.mkfifo(directory / "chat_template.jinja")
    snapshot = WeightsSnapshot.open(directory)
    snapshot.keep(None)
    with pytest.raises(CheckpointError, match=r"golden\.json: leads out of the directory"):
        read_json(snapshot.directory / "golden.json")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: is not a regular file"):
        regular_file(snapshot.directory / "chat_template.jinja")
    snapshot.close()


def test_copies_in_memory_leave_no_file_name_and_no_descriptor(directory: Path, tmp_path: Path) -> None:
    names, before = sorted(tmp_path.rglob("*")), len(list(Path("/proc/self/fd").iterdir()))
    snapshot = WeightsSnapshot.open(directory)
    snapshot.keep(None)
    assert sorted(tmp_path.rglob("*")) == names
    snapshot.close()
    snapshot.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_copies_in_memory_cannot_be_changed(snapshot: WeightsSnapshot) -> None:
    with pytest.raises(PermissionError):
        os.truncate(snapshot.version.files["config.json"], 0)
    with Path(snapshot.version.files["config.json"]).open("r+b", buffering=0) as file, pytest.raises(PermissionError):
        file.write(b"{}")


@pytest.mark.parametrize("in_memory_bytes", [24 << 20, 0])
def test_full_disk_is_logged_and_the_originals_are_used(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    in_memory_bytes: int,
) -> None:
    faults = arm_this_process(tmp_path / "faults", monkeypatch)
    faults.arm("weights.copy", "disk full", after=2)
    monkeypatch.setattr(weights_snapshot, "_MAX_IN_MEMORY_BYTES", in_memory_bytes)
    snapshot, before = WeightsSnapshot.open(directory), _hashes(directory)
    snapshot.keep(WeightsStore(tmp_path / "store", 1 << 30))
    (line,) = caplog.messages
    assert re.search(r"no private copy of .*model\.safetensors \(.*No space left on device.*\)", line)
    assert {path.name for path in tmp_path.glob("store/*")} <= {".lock"}
    _replace_files(directory)
    assert _hashes(snapshot.directory) == before
    snapshot.close()


def test_without_a_store_only_small_files_are_copied(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    (directory / "large.safetensors").touch()
    os.truncate(directory / "large.safetensors", 25 << 20)
    snapshot = WeightsSnapshot.open(directory)
    snapshot.keep(None)
    assert f"{directory}: no private copy of large.safetensors (there is no cache directory" in caplog.text
    snapshot.close()


def test_unreadable_version_falls_back_to_the_directory(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    version = WeightsVersion(directory=str(directory), files={"config.json": "/proc/1/fd/9999"}, hashes={"x": "y"})
    assert readable(version) == directory
    assert "cannot read" in caplog.text
