"""Standard streams that are closed at the start: no socket takes their descriptors."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.support import ROOT

pytestmark = pytest.mark.slow


def _status(url: str) -> int:
    try:
        return httpx.get(f"{url}/health/ready").status_code
    except httpx.TransportError:
        return 0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_socket_takes_the_number_of_a_closed_stream(weights: Path) -> None:
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    serve = ["-m", "tests.support.fake_service", "1", "serve", "--port", str(port), "--weights", str(weights)]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("INKSTREAM_")} | {"PYTHONPATH": str(ROOT)}
    command = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, *serve]
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=ROOT, env=variables, stdin=null, stdout=null, stderr=null)
    try:
        deadline = time.monotonic() + 60
        while _status(url) != 200:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        (engine,) = _children(process.pid)
        for pid in (process.pid, engine):
            for number in range(3):
                assert str(Path(f"/proc/{pid}/fd/{number}").readlink()) == os.devnull, (pid, number)
        answer = httpx.post(f"{url}/complete", json={"prompt": "x", "max_tokens": 3, "stream": False})
        assert answer.status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()


def test_an_error_without_standard_error_is_no_output() -> None:
    """print() with no sys.stderr writes to standard output."""
    command = ["sh", "-c", '"$0" -m app check /nothing 2>&-', sys.executable]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=300, check=False)
    assert (result.returncode, result.stdout) == (2, b"")
