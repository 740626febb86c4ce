"""The service in a real cgroup: it fits into the limit that `check` prints, and the log says when memory ran out."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.cgroups import entering, own_cgroup, run_in
from tests.support.load.concurrent_clients import engine_pid
from tests.support.servers import Server, start_server, stop_server

pytestmark = pytest.mark.slow

MIB = 1 << 20
_HOG = "held = bytearray(b'x') * (2 << 30)"


def _mem_limits(weights: Path) -> list[int]:
    """The limits in bytes that `check` prints: to serve in float32 and bfloat16, and with reloads."""
    command = [sys.executable, "-m", "app", "check", str(weights)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout
    line = next(line for line in printed.splitlines() if line.split()[0] == "mem_limit")
    return [int(number) * MIB for number in re.findall(r"(\d+)m in", line)]


def _start(folder: Path, weights: Path, cgroup: Path, *flags: str) -> Server:
    return start_server(folder, weights, "--dtype", "float32", *flags, wrapper=entering(cgroup))


def test_service_and_reload_fit_into_the_limits_that_check_prints(tmp_path: Path, weights: Path) -> None:
    serving, _, reloading, _ = _mem_limits(weights)
    with own_cgroup(serving) as cgroup:
        server = _start(tmp_path, weights, cgroup, "--log-format", "json")
        free, blocks = re.findall(r"([\d,]+) MiB are free|, (\d+) cache blocks", server.log_text())[:2]
        assert int(free[0].replace(",", "")) * MIB < serving
        assert stop_server(server) == 0
    with own_cgroup(reloading) as cgroup:
        server = _start(tmp_path, weights, cgroup, "--log-format", "json")
        os.kill(server.process.pid, signal.SIGHUP)
        assert server.has_logged("new weights are served")
        assert "that running engines have reserved" in server.log_text()
        assert set(re.findall(r", (\d+) cache blocks", server.log_text())) == {blocks[1]}
        assert stop_server(server) == 0


def test_engine_that_the_kernel_kills_for_memory_is_reported_as_such(tmp_path: Path, weights: Path) -> None:
    with own_cgroup(700 * MIB) as cgroup:
        server = start_server(tmp_path, weights, wrapper=entering(cgroup), fake_ms=1)
        try:
            score = Path(f"/proc/{engine_pid(server)}/oom_score_adj")
            score.write_text("1000")
            if run_in(cgroup, sys.executable, "-c", _HOG).returncode == 0:
                pytest.skip("the kernel swaps instead")
            assert server.has_logged("was ended by SIGKILL: out of memory, the kernel killed it", "may use 700 MiB")
            before = len(server.log_text())
            assert server.wait_for(lambda: _is_ready(server))
            os.kill(engine_pid(server), signal.SIGKILL)
            assert server.has_logged("was ended by SIGKILL", since=before)
        finally:
            server.process.kill()
            server.process.wait()


def _is_ready(server: Server) -> bool:
    return server.metric("engine_ready") == 1
