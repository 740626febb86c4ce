"""A disk that gets full during training: the weights so far are kept, and the error says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

from model.checkpoint.checkpoint import load_config
from model.files import CheckpointError
from model.train.training_checkpoint import load_snapshot, newest_snapshot
from tests.support import ROOT
from tests.support.disk_faults import SPACE, Operations, no_space, watched
from tests.support.model.training_runs import EXACT, SMALL, TINY, signal_after, state_of, train, train_until

pytestmark = pytest.mark.slow


def _full(*_: object) -> None:
    raise CheckpointError("cannot be written (No space left on device)")


def test_a_run_goes_on_without_room_for_snapshots_and_says_so(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.train.loop.save_snapshot", _full)
    out = tmp_path / "out"
    assert train(text, out, *TINY, "--steps", "3", "--save-seconds", "0.0001") == 0
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 4 and warnings[0].startswith("warning: no snapshot of step 1, there is none yet: ")
    assert warnings[-1].endswith("No space left on device); training continues")
    assert load_config(out).width == 32


def test_a_signal_without_room_for_a_snapshot_names_the_one_that_stands(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, flags = tmp_path / "out", [*TINY, *EXACT, "--steps", "4"]
    train_until(2, text, out, *flags)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("model.train.loop.save_snapshot", _full)
        signal_after(3, patch)
        assert train(text, out, *flags, "--resume") == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert f"no snapshot of step 3, {out}/.training/step-00000002 remains the latest" in errors[0]
    assert train(text, out, *flags, "--resume") == 0
    assert state_of(out)[0] == 4


def test_a_reader_of_the_output_that_goes_away_ends_no_run(tmp_path: Path, text: Path) -> None:
    """... | head, or a log on a full disk."""
    command = [sys.executable, "-m", "model.train", "--data", str(text), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [*command, *SMALL, *TINY, "--steps", "2", "--report-seconds", "0.001"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    process.stdout.close()
    _, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (0, "")
    assert load_config(tmp_path / "out").width == 32


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.8])
def test_a_disk_full_from_any_operation_on_ends_in_a_result_or_in_one_line(
    tmp_path: Path, text: Path, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, counting = [*TINY, "--steps", "2", "--save-seconds", "0.0001"], Operations()
    with watched(counting):
        assert train(text, tmp_path / "dry", *flags) == 0
    capsys.readouterr()
    out, needing = tmp_path / "out", [number for number, what in enumerate(counting.seen) if what != "rmtree"]
    at = needing[int(share * len(needing))]
    with watched(Operations(no_space, at, SPACE)):
        code = train(text, out, *flags)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert (code, len(errors)) in ((0, 0), (2, 1))
    assert newest_snapshot(out / ".training") is None or load_snapshot(out / ".training")
    assert train(text, out, *flags, "--resume") == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_disk_without_a_byte_left_is_told_in_one_line_and_nothing_stays(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """mkdir works on a full disk; writing the lock's owner failed, and the error blamed the output."""
    real = Path.open

    def full(path: Path, mode: str = "r", **named: Any) -> IO[Any]:
        return real(Path("/dev/full"), "r+") if path.name == "lock" else real(path, mode, **named)

    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr("model.train.common.output_dir._is_current", lambda _lock: True)
    monkeypatch.setattr("os.ftruncate", lambda *_: None)  # of what is no file
    assert train(text, tmp_path / "new" / "out", *TINY, "--steps", "1") == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"error: --out {tmp_path}/new/out: cannot be written (No space left on device); free some space"
    )
    assert error.count("\n") == 1
    assert list(tmp_path.glob("new*")) == []
