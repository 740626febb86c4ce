"""kill -9 at any moment of a checkpoint save: the newest good checkpoint loads, and no stale file is taken for one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from model.train.training_checkpoint import load_snapshot
from tests.promises.test_r18_disk_full import _save_run, _version_of_run
from tests.support import ROOT
from tests.support.disk_faults import Operations, kill, watched
from tests.support.model.tiny_models import TEXT
from tests.support.promise_figures import Promise


def _save_and_die(folder: Path, at: int) -> int:
    """A child saves number 2 and is killed at operation `at`; how it ended."""
    child = os.fork()
    if child == 0:
        with watched(Operations(kill, at)):
            _save_run(folder, 2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_save_killed_at_any_operation(tmp_path: Path, promise: Promise) -> None:
    torch.set_num_threads(1)
    counting = Operations()
    _save_run(tmp_path / "dry", 1)
    with watched(counting):
        _save_run(tmp_path / "dry", 2)
    good = 0
    for number, what in enumerate(counting.seen):
        folder = tmp_path / str(number)
        _save_run(folder, 1)
        assert _save_and_die(folder, number) == -signal.SIGKILL
        renamed = "rename" in counting.seen[:number]
        kept = _version_of_run(folder)
        _save_run(folder, 3)  # and the killed save's leftovers do not block it
        clean = [path.name for path in folder.iterdir()] == ["step-00000003"]
        good += kept == (2 if renamed else 1) and clean
        print(number, what, kept, clean)
    promise.all_of("saves killed at each operation: newest good snapshot loads", good, len(counting.seen))


def test_a_file_cut_short_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control: an invalid directory under a checkpoint's name is reported and not loaded."""
    _save_run(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000009")
    state = tmp_path / "step-00000009/state.safetensors"
    state.write_bytes(state.read_bytes()[:-100])
    assert _version_of_run(tmp_path) == 1
    assert "damaged snapshot" in capsys.readouterr().out


def _start(text: Path, out: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "model.train", "--data", str(text), "--out", str(out), "--preset", "nano"]
    command += ["--vocab-size", "300", "--context", "32", "--windows", "4", "--device", "cpu", "--steps", "100000"]
    command += ["--save-seconds", "0.001", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def _wait_for_save(process: subprocess.Popen[bytes], work: Path, after: int) -> None:
    """Waits until a save of a step beyond `after` has started."""
    deadline = time.monotonic() + 60
    while True:
        steps = [int(path.name[6:]) for path in work.glob(".step-*")]
        if any(step > after for step in steps):
            return
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def test_training_killed_while_it_saves_goes_on_from_the_newest(tmp_path: Path, promise: Promise) -> None:
    """The real script, killed within a save and started again with --resume, again and again."""
    (tmp_path / "text.txt").write_text(TEXT * 5)
    work, n, good, last = tmp_path / "out/.training", promise.size(2, 50), 0, 0
    rng = random.Random(12)
    for number in range(n):
        process = _start(tmp_path / "text.txt", tmp_path / "out", *(["--resume"] if number else []))
        try:
            _wait_for_save(process, work, last + 1)
            time.sleep(rng.uniform(0, 0.02))
        finally:
            process.kill()
            process.communicate()
        named = sorted(int(path.name[5:]) for path in work.glob("step-*"))
        found = load_snapshot(work)
        good += found is not None and found[0].step == named[-1] > last
        last = named[-1]
    promise.all_of("model.train killed while it saves: goes on from the newest snapshot", good, n)
