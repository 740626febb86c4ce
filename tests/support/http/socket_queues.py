"""Whether the service has read everything sent to it, from the kernel's socket queues, without a request. Linux only.

Who comes next is then really next. Without it a service that got no core for a moment accepts all who came meanwhile
before it reads from any of them, and to its limits those who have sent a request are as silent as the others.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.servers import Server

_ESTABLISHED, _LISTENING = "01", "0A"


def has_read_all(server: Server) -> bool:
    """Whether no connection waits to be accepted, and none has bytes that were not read."""
    address = f"0100007F:{int(server.url.rpartition(':')[2]):04X}"  # 127.0.0.1; clients on 127.0.0.2 may have this port
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    own = [row for row in rows if row[1] == address and row[3] in (_ESTABLISHED, _LISTENING)]
    assert own, "no process listens there"
    # Of one that listens it is how many wait to be accepted, of all others how many bytes wait to be read.
    return not any(int(row[4].partition(":")[2], 16) for row in own)
