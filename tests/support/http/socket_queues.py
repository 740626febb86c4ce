"""Reads from the kernel's socket queues whether the service has read everything sent to it. Linux only.

After that the next client is really next. Otherwise a service that got no CPU for a moment accepts all waiting clients
before it reads from any of them, and its limits treat clients that have sent a request like silent ones.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.servers import Server

_ESTABLISHED, _LISTENING = "01", "0A"


def has_read_all(server: Server) -> bool:
    """Whether no connection is waiting to be accepted or has unread bytes."""
    address = (
        f"0100007F:{int(server.url.rpartition(':')[2]):04X}"  # 127.0.0.1; clients on 127.0.0.2 may use the same port
    )
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    own = [row for row in rows if row[1] == address and row[3] in (_ESTABLISHED, _LISTENING)]
    assert own, "no process listens on the service's port"
    # rx_queue: connections to be accepted of a listening socket, unread bytes of all others.
    return not any(int(row[4].partition(":")[2], 16) for row in own)
