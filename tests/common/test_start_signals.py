"""Signals before a verb has its own handlers: held, silent, or ignored as the parent process asked."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

_HOLD = "import os, signal; from app.common.start_signals import hold_signals; "


def run(program: str, prepare: str = "pass") -> subprocess.CompletedProcess[str]:
    """Runs a program in a process whose parent executes `prepare` before."""
    start = f"import os, signal, sys; {prepare}; os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    command = [sys.executable, "-c", start, program]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, start_new_session=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_service_remembers_a_hangup_and_other_verbs_end() -> None:
    send = "os.kill(os.getpid(), signal.SIGHUP); print(signal.getsignal(signal.SIGHUP).is_pending)"
    assert run(f"{_HOLD}hold_signals(serves=True); {send}").stdout == "True\n"
    assert run(f"{_HOLD}hold_signals(serves=False); {send}").returncode == -signal.SIGHUP


@pytest.mark.parametrize("serves", [False, True])
def test_interrupt_ends_silently(serves: bool) -> None:
    ended = run(f"{_HOLD}hold_signals(serves={serves}); os.kill(os.getpid(), signal.SIGINT)")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_what_the_parent_ignores_stays_ignored() -> None:
    ignore = "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGHUP)]"
    send = "[os.kill(os.getpid(), n) for n in (signal.SIGINT, signal.SIGHUP)]; print('alive')"
    assert run(f"{_HOLD}hold_signals(serves=True); {send}", prepare=ignore).stdout == "alive\n"


def test_engine_without_a_parent_ends_before_it_imports_anything() -> None:
    parent, child = socket.socketpair()
    parent.close()
    program = (
        "import runpy, sys; sys.modules['app.engine.startup'] = None; "
        "runpy.run_module('app.engine', run_name='__main__')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(child.fileno())], pass_fds=[child.fileno()], capture_output=True,
        text=True, timeout=60, check=False, cwd=Path(ROOT),
    )  # fmt: skip
    child.close()
    assert (ended.returncode, ended.stderr) == (0, "")
