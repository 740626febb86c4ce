"""S16: The service has one listening socket and opens no connection to anywhere; its other processes have none."""

from __future__ import annotations

from pathlib import Path

from tests.support.completion_client import fetch_completion
from tests.support.processes import family
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

LISTEN, ESTABLISHED, SYN_SENT = "0A", "01", "02"


def _inodes(pid: int) -> set[str]:
    """Inodes of the process's open sockets."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def _internet(pid: int) -> list[tuple[str, str, str]]:
    """The process's internet sockets: table, local port, state."""
    inodes, found = _inodes(pid), []
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[9] in inodes:
                found.append((table, str(int(columns[1].rpartition(":")[2], 16)), columns[3]))
    return found


def _check(server: Server) -> list[str]:
    """Violations of the promise."""
    port = server.url.rpartition(":")[2]
    wrong = []
    n_listening = 0
    for pid in family(server.process.pid):
        for table, local_port, state in _internet(pid):
            n_listening += state == LISTEN
            # Client connections have the service's port as local port.
            if pid != server.process.pid or not table.startswith("tcp") or local_port != port:
                wrong.append(f"{pid}: {table} {local_port} {state}")
    return wrong + ([] if n_listening == 1 else [f"{n_listening} sockets listen"])


def test_one_socket_listens_and_none_connects_out(server: Server, promise: Promise) -> None:
    checks = [_check(server)]
    fetch_completion(server.url, prompt="a", max_tokens=20, regex="[a-z]+")
    fetch_completion(server.url, prompt="a", max_tokens=20)
    checks.append(_check(server))
    assert len(family(server.process.pid)) >= 2, "the check must cover the engine process, too"
    assert checks == [[], []]
    promise.all_of("checks of all processes' sockets that find only the expected ones", 2, 2)


def test_extra_sockets_are_detected(serve: Services) -> None:
    """Control: a metrics exporter on another port, and an outgoing connection."""
    sabotage = (
        "import socket; a = socket.create_server(('127.0.0.1', 0)); b = socket.create_connection(a.getsockname())"
    )
    server = serve(sabotage=sabotage)
    found = _check(server)
    assert "2 sockets listen" in found and len(found) >= 3
