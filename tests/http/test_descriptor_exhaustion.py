"""The event loop sleeps, rather than spin, when another thread has taken libuv's reserved descriptor."""

from __future__ import annotations

import subprocess
import sys

from tests.support import ROOT

_SERVICE = """
import asyncio, os, resource, socket, sys, threading, time
import uvloop
from app.http.connection_limits import ConnectionLimits
from app.common.settings import Settings
from app.main import connection_limits

is_monitored = sys.argv[1] == "monitored"


async def main():
    limits = ConnectionLimits(connection_limits(Settings()))

    class Connection(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport
            limits.register(transport, "127.0.0.1")

        def connection_lost(self, error):
            limits.unregister(self.transport)

    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", 0)
    clients = [socket.socket() for _ in range(100)]
    monitor = loop.create_task(limits.monitor_descriptors()) if is_monitored else None
    await asyncio.sleep(0.1)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            fillers.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass

    def take_descriptors():
        while not is_enough.is_set():
            try:
                os.close(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                pass

    is_enough = threading.Event()
    thread = threading.Thread(target=take_descriptors)
    thread.start()
    for client in clients:
        client.setblocking(False)
        client.connect_ex(server.sockets[0].getsockname())
        await asyncio.sleep(0.01)
    is_enough.set()
    thread.join()
    await asyncio.sleep(2.5)
    cpu, began = time.process_time(), time.monotonic()
    await asyncio.sleep(0.5)
    print((time.process_time() - cpu) / (time.monotonic() - began))
    os._exit(0)


uvloop.run(main())
"""


def _cpu_share(monitored: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", _SERVICE, monitored], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return float(done.stdout)


def test_the_loop_sleeps_after_it_has_lost_its_reserved_descriptor() -> None:
    """The control without the monitor spins."""
    spinning, monitored = _cpu_share("plain"), _cpu_share("monitored")
    assert monitored < spinning / 4, (spinning, monitored)
