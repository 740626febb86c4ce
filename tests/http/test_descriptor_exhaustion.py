"""The event loop sleeps, rather than spin, when libuv has lost its reserved descriptor."""

from __future__ import annotations

import subprocess
import sys

from tests.support import ROOT

# libuv loses it when another thread opens a file during an accept. Here it loses it because the limit on descriptors
# was lowered to the reserved one, which therefore cannot be opened again; this needs no race.
_SERVICE = """
import asyncio, os, resource, socket, sys, time
import uvloop
from app.http.connection_limits import ConnectionLimits
from app.common.settings import Settings
from app.main import connection_limits

is_monitored = sys.argv[1] == "monitored"


def open_null():
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {int(path.rpartition("/")[2]) for path in paths if os.path.exists(path) and os.readlink(path) == os.devnull}


async def main():
    limits = ConnectionLimits(connection_limits(Settings()))

    class Connection(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport
            limits.register(transport, "127.0.0.1")

        def connection_lost(self, error):
            limits.unregister(self.transport)

    loop = asyncio.get_running_loop()
    monitor = loop.create_task(limits.monitor_descriptors()) if is_monitored else None
    await asyncio.sleep(0)
    before = open_null()
    server = await loop.create_server(Connection, "127.0.0.1", 0)
    (reserved,) = open_null() - before
    clients = [socket.socket() for _ in range(20)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (reserved, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            os.open(os.devnull, os.O_RDONLY)
    except OSError:
        pass
    for client in clients:
        client.setblocking(False)
        client.connect_ex(server.sockets[0].getsockname())
    await asyncio.sleep(2.5 if is_monitored else 0.1)  # the monitor runs periodically; the control spins
    cpu, began = time.process_time(), time.monotonic()
    await asyncio.sleep(0.5)
    print((time.process_time() - cpu) / (time.monotonic() - began), flush=True)
    os._exit(0)


uvloop.run(main())
"""


def test_loop_sleeps_after_losing_its_reserved_descriptor() -> None:
    """Without the monitor, the positive control spins."""
    command = [sys.executable, "-c", _SERVICE]
    services = [
        subprocess.Popen([*command, mode], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for mode in ("control", "monitored")
    ]
    spinning, monitored = (float(service.communicate(timeout=60)[0]) for service in services)
    assert monitored < spinning / 4, (spinning, monitored)
