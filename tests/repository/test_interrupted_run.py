"""Ctrl+C during a test run ends all processes that the tests have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support import ROOT

pytestmark = pytest.mark.slow

# The service has its own session, and its test cleans up slowly.
_TESTS = """
import subprocess, time
from pathlib import Path


def test_of_a_service():
    service = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path("new").write_text(str(service.pid))
    Path("new").rename("started")
    try:
        time.sleep(1000)
    finally:
        time.sleep(1000)
"""


def test_interrupted_test_run_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "test_service.py").write_text(_TESTS)
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "tests.support.interrupted_run"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(ROOT)
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "started").exists():
                assert run.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            started = psutil.Process(int((tmp_path / "started").read_text()))
            os.killpg(run.pid, signal.SIGINT)
            output, _ = run.communicate(timeout=60)
        finally:
            run.kill()
    assert run.returncode == pytest.ExitCode.INTERRUPTED and "KeyboardInterrupt" in output
    deadline = time.monotonic() + 60
    while not _has_ended(started):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _has_ended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE  # if process 1 does not reap orphans
    return True
