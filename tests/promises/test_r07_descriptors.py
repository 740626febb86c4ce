"""R7: Without free file descriptors, and with clients that vanish, the service keeps running and recovers."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import ROOT
from tests.support.completion_client import fetch_completion
from tests.support.http.raw_client import (
    connect,
    error_of,
    get_request,
    post_request,
    read_all,
    read_response,
    reset,
    status_of,
)
from tests.support.http.socket_queues import has_read_all
from tests.support.processes import open_files
from tests.support.promise_figures import Promise
from tests.support.servers import Server, stop_server
from tests.support.services import Services

INCOMPLETE_BODY = post_request({"prompt": "a" * 100})[:-50]
"""A client that has sent this has an active request; its connection is never evicted."""


def _limited(descriptors: int) -> tuple[str, ...]:
    """Command prefix that runs the rest of the command with this limit of open files."""
    return "bash", "-c", f'ulimit -n {descriptors}; exec "$@"', "bash"


@pytest.fixture(scope="module")
def server(serve_module: Services) -> Server:
    """A service whose idle clients are not disconnected during these tests."""
    return serve_module(fake_ms=1)


def _cpu_share(server: Server) -> float:
    """CPU seconds per second, over one second."""

    def cpu() -> float:
        columns = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(columns[11]) + int(columns[12])) / 100

    before, began = cpu(), time.monotonic()
    time.sleep(1)
    return (cpu() - before) / (time.monotonic() - began)


def _connect_all(server: Server, n: int, data: bytes = b"") -> list[socket.socket]:
    connections = []
    for _ in range(n):
        try:
            connections.append(connect(server))
            connections[-1].sendall(data)
        except OSError:
            continue
    return connections


def _is_healthy(server: Server) -> bool:
    return httpx.get(f"{server.url}/health/ready", timeout=60).status_code == 200 and bool(
        fetch_completion(server.url, prompt="a", max_tokens=3)["choices"]
    )


def test_1000_connections_with_256_descriptors(serve: Services, promise: Promise) -> None:
    server = serve("--head-timeout", "3", "--keep-alive-timeout", "3", fake_ms=1, wrapper=_limited(256))
    before = open_files(server.process.pid)
    # One address may hold half of the limit; further connections find no idle one to evict.
    busy = _connect_all(server, 80, INCOMPLETE_BODY)
    assert server.wait_for(lambda: has_read_all(server))
    busy += _connect_all(server, 920, INCOMPLETE_BODY)
    probes = []
    for _ in range(10):
        with connect(server) as probe:
            probe.sendall(get_request("/health/live"))
            probes.append(status_of(read_all(probe)))
    with connect(server) as one_too_many:
        one_too_many.sendall(post_request({"prompt": "a"}))
        refused = read_all(one_too_many)
    assert (status_of(refused), error_of(refused)["code"]) == (503, "too_many_connections")
    assert b"retry-after: " in refused.lower()
    used = open_files(server.process.pid)
    cpu = promise.measured(lambda: _cpu_share(server), lambda share: share <= 0.1)
    for connection in busy:
        connection.close()
    assert server.wait_for(lambda: open_files(server.process.pid) <= before + 8)
    assert _is_healthy(server)
    assert server.metric('connections_cut_total{reason="address"}') > 700
    promise.all_of("/health/live responses with 1,000 connections and 256 descriptors", probes.count(200), 10)
    promise.at_most("descriptors used of 256", used, target=250, unit="", n=1000)
    promise.at_most("CPU while these connections stay open", cpu, target=0.1, floor=0.5, unit="s/s", n=1)
    assert "allows only 160 connections" in server.log.read_text()


@pytest.mark.parametrize("limit", [24, 127])
def test_start_with_too_few_descriptors_fails_in_one_line(weights: Path, limit: int) -> None:
    """Not 16: with 16 Python cannot import everything on every machine."""
    command = [*_limited(limit), sys.executable, "-m", "app", "serve", "--port", "0", "--weights", str(weights)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr == f"error: the limit of open files is {limit}: raise ulimit -n to at least 128\n"


def test_service_survives_running_out_of_descriptors(server: Server, promise: Promise) -> None:
    limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    with connect(server) as early:
        early.sendall(get_request())
        assert status_of(read_response(early)) == 200
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (open_files(server.process.pid), limits[1]))
        connections = _connect_all(server, 300)
        assert server.has_logged("no file descriptors left")  # the service checks once a second
        cpu = promise.measured(lambda: _cpu_share(server), lambda share: share <= 0.2)
        early.sendall(post_request({"prompt": "a", "max_tokens": 3, "stream": False}))
        assert status_of(read_response(early)) == 200, "a connected client must be served"
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)
    for connection in connections:
        connection.close()
    assert server.wait_for(lambda: _is_healthy(server), 5)
    assert server.log_text().count("no file descriptors left") == 1
    promise.at_most("CPU while no connection can be accepted", cpu, target=0.2, floor=0.6, unit="s/s", n=300)
    promise.all_of("recovered after running out of descriptors", 1, 1)


def _reset_during_response(server: Server, request: dict[str, Any], after: float) -> None:
    """A RST while the service writes: its next write fails with EPIPE or ECONNRESET."""
    connection = connect(server)
    connection.sendall(post_request(request))
    time.sleep(after)
    reset(connection)


def test_clients_that_reset_mid_response_leave_nothing_behind(server: Server, promise: Promise) -> None:
    n, since, before = promise.size(60, 500), len(server.log_text()), open_files(server.process.pid)
    for i in range(n):
        request = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": i % 4 != 0}
        _reset_during_response(server, request, 0.002 * (i % 12))
    assert server.wait_for(lambda: server.metric("requests_running") == 0)
    assert server.wait_for(lambda: open_files(server.process.pid) <= before + 2)
    assert _is_healthy(server)
    assert stop_server(server) == 0 and '"level": "error"' not in server.log_text()[since:]
    promise.all_of("resets in mid-response that leave nothing behind", n, n)
