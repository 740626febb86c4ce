"""Ctrl+C during make ray leaves no process, wherever it hangs. Runs without Ray."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from tests.support import ROOT

GUARD = [sys.executable, "-m", "tests.ray.guard"]
HANGS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
orphan = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
subprocess.run([sys.executable, "-c", orphan])
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: it asks the kernel for orphans")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_a_hanging_script_and_its_orphans(number: signal.Signals) -> None:
    command = [*GUARD, "-c", HANGS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as guard:
        assert guard.stdout
        orphan = int(guard.stdout.readline())
        guard.send_signal(number)
        assert guard.wait(timeout=60) == 130
    assert not psutil.pid_exists(orphan)


def test_exit_status_of_the_script_is_returned() -> None:
    done = subprocess.run([*GUARD, "-c", "raise SystemExit(3)"], cwd=ROOT, check=False)
    assert done.returncode == 3
