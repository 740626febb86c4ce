"""Copies in the store hold what the weights files held, and a later start finds them: whatever happens in between."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from app.common import weights_store
from app.common.weights_store import FileHashes, WeightsStore
from app.serving import stored_copies, weights_snapshot
from app.serving.weights_snapshot import WeightsSnapshot
from model.checkpoint.tensor_index import version_of
from model.files import CheckpointError, sha256
from model.weights_version import WeightsFile
from tests.support.armed_faults import arm_this_process

LIMIT = 1 << 30
SIZE = 3 << 20
_ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files are copied to the store, and are old enough for their times to be trusted."""
    monkeypatch.setattr(weights_snapshot, "_MAX_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(weights_store, "_SETTLED_NS", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / weights_store.FOLDER


def _weights(directory: Path, seed: int, size: int = SIZE) -> Path:
    """A directory whose only weights file is `size` random bytes: nothing here reads tensors."""
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").write_bytes(random.Random(seed).randbytes(size))
    (directory / "config.json").write_text(json.dumps({"seed": seed}))
    return directory


class _Service:
    """What a service does with its weights."""

    def __init__(self, weights: Path, folder: Path, limit: int = LIMIT) -> None:
        self.snapshot = WeightsSnapshot.open(weights)
        self.store = WeightsStore(folder, limit)
        self.snapshot.keep(self.store)
        self.version = self.snapshot.version
        self.is_copied_now = bool(self.version.hashes)

    @property
    def content(self) -> dict[str, str]:
        """SHA-256 of what its processes read."""
        return {name: sha256(Path(path)) for name, path in self.version.files.items()}

    def close(self) -> None:
        _join()
        self.snapshot.close()


def _join() -> None:
    for thread in threading.enumerate():
        if thread.name == "weights store":
            thread.join()


def _serve(weights: Path, folder: Path, limit: int = LIMIT) -> tuple[bool, dict[str, str]]:
    """One start and its end: whether it copied, and what it served."""
    service = _Service(weights, folder, limit)
    outcome = service.is_copied_now, service.content
    service.close()
    return outcome


def _content(weights: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in weights.iterdir()}


def _copy_of(folder: Path, weights: Path) -> Path:
    digest = sha256(weights / "model.safetensors")
    return folder / version_of({weights: digest})[:32] / digest


def _fail(*_: object) -> NoReturn:
    raise AssertionError("a file was read whole again")


def test_second_start_reads_no_weights(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = _weights(tmp_path / "weights", 1)
    expected = _content(weights)
    assert _serve(weights, folder) == (True, expected)
    monkeypatch.setattr(stored_copies, "hash_of", _fail)
    monkeypatch.setattr(weights_store, "hash_of", _fail)
    service = _Service(weights, folder)
    assert (service.is_copied_now, service.content) == (False, expected)
    monkeypatch.setattr(weights_store, "sha256", _fail)
    hashes = FileHashes(service.version, service.store)
    assert hashes.digest(service.version / "model.safetensors") == expected["model.safetensors"]
    assert not hashes.has_news
    service.close()


def _overwrite(weights: Path) -> None:
    """In place, with the same size and modification time."""
    file = weights / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as opened:
        opened.write(random.Random(99).randbytes(before.st_size))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _rename_over(weights: Path) -> None:
    _weights(weights.with_name("new"), 7)
    for path in weights.with_name("new").iterdir():
        path.replace(weights / path.name)


def _change_the_configuration(weights: Path) -> None:
    (weights / "config.json").write_text('{"seed": "another"}')


@pytest.mark.parametrize("change", [_overwrite, _rename_over, _change_the_configuration])
def test_changed_sources_change_neither_the_running_service_nor_the_stored_version(
    tmp_path: Path, folder: Path, change: Callable[[Path], None]
) -> None:
    weights = _weights(tmp_path / "weights", 1)
    before = _content(weights)
    first = _Service(weights, folder)
    _join()
    later = _Service(weights, folder)
    stored = {path: sha256(path) for path in folder.glob("*/*") if len(path.name) == 64}
    assert stored and all(path.name == digest for path, digest in stored.items())
    change(weights)
    after = _content(weights)
    assert after != before
    assert first.content == later.content == before
    assert _serve(weights, folder)[1] == after
    assert all(sha256(path) == digest for path, digest in stored.items())
    assert first.content == later.content == before
    first.close()
    later.close()


def test_same_weights_elsewhere_are_found_by_content(tmp_path: Path, folder: Path) -> None:
    weights = _weights(tmp_path / "weights", 1)
    _serve(weights, folder)
    other = Path(shutil.copytree(weights, tmp_path / "other"))
    n_files = len(list(folder.glob("*/*")))
    assert _serve(other, folder) == (False, _content(other))
    assert len(list(folder.glob("*/*"))) == n_files


def _flip(path: Path) -> None:
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    path.chmod(0o400)


def _truncate(path: Path) -> None:
    path.chmod(0o600)
    os.truncate(path, path.stat().st_size // 2)


def _let_others_write(path: Path) -> None:
    path.chmod(0o622)


def _replace_by_link(path: Path) -> None:
    moved = path.rename(path.with_name("moved"))
    path.symlink_to(moved)


def _damage_what_is_known(path: Path) -> None:
    described = path.with_name("version.json")
    described.write_text(described.read_text().replace(path.name, "0" * 64))


@pytest.mark.parametrize(
    "damage", [_flip, _truncate, _let_others_write, _replace_by_link, Path.unlink, _damage_what_is_known]
)
def test_damaged_copies_are_made_again(tmp_path: Path, folder: Path, damage: Callable[[Path], None]) -> None:
    weights = _weights(tmp_path / "weights", 1)
    _serve(weights, folder)
    damage(_copy_of(folder, weights))
    assert _serve(weights, folder)[1] == _content(weights)
    assert _serve(weights, folder) == (False, _content(weights)), "the damaged copy was replaced"
    assert sha256(_copy_of(folder, weights)) == _copy_of(folder, weights).name


def test_copy_that_changes_without_its_times_is_noticed_before_its_numbers_are_used(
    tmp_path: Path, folder: Path
) -> None:
    """As a damaged disk does it: the store's record is made to fit the damaged file."""
    weights = _weights(tmp_path / "weights", 1)
    _serve(weights, folder)
    copy = _copy_of(folder, weights)
    _flip(copy)
    store = WeightsStore(folder, LIMIT)
    version = sha256(weights / "model.safetensors")
    with store.writing():
        os.close(store.add(version, {}, {weights_store.FileIdentity.of(copy): copy.name}) or -1)
    service = _Service(weights, folder)
    hashes = FileHashes(service.version, store)
    file = service.version / "model.safetensors"
    assert isinstance(file, WeightsFile) and hashes.digest(file) == version, "the record was believed so far"
    with pytest.raises(CheckpointError, match=r"model\.safetensors: its content has changed and its times have not"):
        hashes.verify(version)
    service.close()
    assert _serve(weights, folder) == (True, _content(weights)), "the next start reads the source anew"


@pytest.mark.parametrize("point", ["open", "sendfile", "fsync", "replace", "write_text"])
def test_full_disk_at_any_operation_leaves_the_opened_files_or_a_whole_copy(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, point: str
) -> None:
    """Fails the n-th call of an operation, for every n until no call fails."""
    weights = _weights(tmp_path / "weights", 1)
    owner: Any = Path if point in ("replace", "write_text") else os
    real = getattr(owner, point)
    for failing in itertools.count(1):
        calls = itertools.count(1)

        def call(*arguments: Any, _calls: Any = calls, _failing: int = failing, **named: Any) -> Any:
            is_store = threading.current_thread().name == "weights store"
            if is_store and next(_calls) == _failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **named)

        shutil.rmtree(folder, ignore_errors=True)
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(owner, point, call)
            assert _serve(weights, folder)[1] == _content(weights)
        if next(calls) <= failing:
            break
        lines = caplog.messages
        assert len(lines) == 1 or (not lines and point == "open"), "one line says what is wrong, unless it is no loss"
        assert all("No space left on device" in line for line in lines)
        assert _serve(weights, folder)[1] == _content(weights)
        assert _serve(weights, folder) == (False, _content(weights)), "the store works again"
        with WeightsStore(folder, LIMIT).writing() as own:
            assert list(folder.glob(".building-*")) == [own], "what is left is removed by the next that writes"
    assert failing > 1, "no call was made to fail"


_SERVE = """
import sys; from pathlib import Path
from app.common import weights_store; from app.serving import weights_snapshot
from app.serving.weights_snapshot import WeightsSnapshot
from model.files import sha256
import threading
weights_snapshot._MAX_IN_MEMORY_BYTES = 0; weights_store._SETTLED_NS = 0
snapshot = WeightsSnapshot.open(Path(sys.argv[1]))
snapshot.keep(weights_store.WeightsStore(Path(sys.argv[2]), 1 << 30))
print(sha256(Path(snapshot.version.files["model.safetensors"])), flush=True)
[thread.join() for thread in threading.enumerate() if thread.name == "weights store"]
if len(sys.argv) > 3: sys.stdin.read()
"""


def _process(weights: Path, folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _SERVE, str(weights), str(folder), *more]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=_ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
def test_processes_at_once_serve_the_same_and_store_it_once(tmp_path: Path, folder: Path) -> None:
    weights = _weights(tmp_path / "weights", 1, size=20 << 20)
    processes = [_process(weights, folder) for _ in range(4)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert {output.strip() for output, _ in outputs} == {sha256(weights / "model.safetensors")}, outputs
    assert len([path for path in folder.glob("*/*") if len(path.name) == 64]) == 2  # and config.json
    assert _serve(weights, folder) == (False, _content(weights))


@pytest.mark.slow
def test_kill_at_any_moment_leaves_a_store_that_works(tmp_path: Path, folder: Path) -> None:
    weights = _weights(tmp_path / "weights", 1, size=48 << 20)
    rng = random.Random("kill")
    started = time.monotonic()
    process = _process(weights, folder)
    assert process.stdout and process.stdout.readline()
    process.communicate(timeout=60)
    whole = time.monotonic() - started
    for _ in range(12):
        shutil.rmtree(folder, ignore_errors=True)
        process = _process(weights, folder)
        time.sleep(whole * rng.uniform(0.3, 1.1))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        assert _serve(weights, folder)[1] == _content(weights)
        assert _serve(weights, folder) == (False, _content(weights))
        with WeightsStore(folder, LIMIT).writing() as own:
            assert list(folder.glob(".building-*")) == [own]


@pytest.mark.slow
def test_versions_in_use_are_never_removed_and_others_by_least_recent_use(tmp_path: Path, folder: Path) -> None:
    weights = [_weights(tmp_path / str(seed), seed) for seed in range(4)]
    in_use = _process(weights[0], folder, "waits")
    assert in_use.stdout and in_use.stdout.readline()
    while not _copy_of(folder, weights[0]).with_name("version.json").exists():
        time.sleep(0.01)
    for age, seed in enumerate((2, 1)):
        _serve(weights[seed], folder)
        os.utime(_copy_of(folder, weights[seed]).with_name(".in-use"), (age, age))
    os.utime(_copy_of(folder, weights[0]).with_name(".in-use"), (-1, -1))
    _serve(weights[3], folder, limit=3 * SIZE + 4096)
    kept = [seed for seed in range(4) if _copy_of(folder, weights[seed]).exists()]
    assert kept == [0, 1, 3], "the least recently used that no service uses is removed"
    in_use.communicate(timeout=60)
    _serve(weights[2], folder, limit=0)
    kept = [seed for seed in range(4) if _copy_of(folder, weights[seed]).exists()]
    assert kept == [2], "once its service has ended, a version is removed like any other"


def test_random_histories_always_serve_the_current_files(tmp_path: Path, folder: Path) -> None:
    """Starts, ends, replacements, damage and small limits in random order, against what the files hold."""
    rng = random.Random("store")
    weights = [_weights(tmp_path / str(index), index, size=1 << 18) for index in range(3)]
    running: list[tuple[_Service, dict[str, str]]] = []
    n_found = 0
    for step in range(150):
        chosen = rng.choice(weights)
        match rng.choice(["start", "start", "start", "end", "overwrite", "rename", "touch", "damage"]):
            case "start":
                service = _Service(chosen, folder, limit=rng.choice([0, 1 << 19, LIMIT]))
                n_found += not service.is_copied_now
                running.append((service, _content(chosen)))
            case "end" if running:
                running.pop(rng.randrange(len(running)))[0].close()
            case "overwrite":
                (chosen / "model.safetensors").write_bytes(rng.randbytes(1 << 18))
            case "rename":
                (chosen / "new").write_bytes(rng.randbytes(1 << 18))
                (chosen / "new").replace(chosen / "model.safetensors")
            case "touch":
                (chosen / "model.safetensors").touch()
            case "damage" if copies := [path for path in folder.glob("*/*") if len(path.name) == 64]:
                path = rng.choice(copies)
                if not any(path.samefile(file) for file in _open_files(running)):
                    rng.choice([_flip, _truncate, Path.unlink])(path)
        for service, content in running:
            assert service.content == content, step
    for service, _ in running:
        service.close()
    assert n_found > 5, "some starts must find their copies"


def _open_files(running: list[tuple[_Service, dict[str, str]]]) -> list[str]:
    return [path for service, _ in running for path in service.version.files.values()]


def test_store_that_another_process_holds_delays_a_start_only_so_long(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stored_copies, "_LOCK_SECONDS", 0.1)
    weights = _weights(tmp_path / "weights", 1)
    with WeightsStore(folder, LIMIT).writing():
        assert _serve(weights, folder)[1] == _content(weights)
    assert "holds the lock" in caplog.text and "no private copy of" in caplog.text


def test_store_in_memory_or_too_small_keeps_nothing(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights = _weights(tmp_path / "weights", 1)
    with monkeypatch.context() as patch:
        patch.setattr(stored_copies, "is_in_memory", lambda _: True)
        assert _serve(weights, folder)[1] == _content(weights)
    assert "is in memory" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(stored_copies, "MAX_BYTES", SIZE)
        assert _serve(weights, folder)[1] == _content(weights)
    assert f"model.safetensors (more than {SIZE >> 20} MiB)" in caplog.text
    assert not list(folder.glob("*/*"))


def test_folders_of_other_names_are_left_alone(tmp_path: Path, folder: Path) -> None:
    """A cache directory that the user chose may hold anything."""
    (folder / "my-model").mkdir(parents=True)
    (folder / "my-model" / "model.safetensors").write_text("mine")
    (folder.parent / "packed").mkdir()
    (folder.parent / "packed" / "mine.bin").write_text("mine")
    (folder.parent / "packed" / "weights-0123.bin").write_text("of a former release")
    _serve(_weights(tmp_path / "weights", 1), folder, limit=0)
    assert (folder / "my-model" / "model.safetensors").read_text() == "mine"
    assert [path.name for path in (folder.parent / "packed").iterdir()] == ["mine.bin"]


def test_faults_can_fill_the_disk_while_copies_are_made(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = arm_this_process(tmp_path / "faults", monkeypatch)
    weights = _weights(tmp_path / "weights", 1)
    with faults.armed("weights.copy", "disk full"):
        assert _serve(weights, folder)[1] == _content(weights)
    assert "No space left on device" in caplog.text
    assert _serve(weights, folder) == (True, _content(weights))
