"""A TCP proxy on loopback that injects network faults into connections.

    with ToxicProxy(server.url, down=Toxics(cut_after=1000)) as proxy:
        httpx.post(f"{proxy.url}/complete", ...)

`up` is the way of the client's bytes, `down` that of the server's. They may be changed while the proxy runs: what
contains is read when a connection starts.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

_READ = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Toxics:
    """Faults of one direction of a connection; none by default."""

    latency: float = 0.0
    """Seconds of delay for each piece."""
    chunk: int = _READ
    """Bytes of a piece."""
    cut_after: int | None = None
    """Close both sides once so many bytes went through: exactly so many arrive."""
    reset: bool = False
    """Whether the cut is a RST (bytes still on their way may get lost), not a FIN."""
    stall_after: int | None = None
    """Let nothing more through after so many bytes, and read nothing more, but keep the connection."""


class ToxicProxy:
    """Runs in a thread with an event loop of its own from `with` to its end."""

    def __init__(self, url: str, *, up: Toxics | None = None, down: Toxics | None = None) -> None:
        parts = urlsplit(url)
        assert parts.hostname and parts.port
        self._target = (parts.hostname, parts.port)
        self.up = up or Toxics()
        self.down = down or Toxics()
        self.n_connections = 0
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._end = asyncio.Event()
        self._open: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)

    def __enter__(self) -> ToxicProxy:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        self._loop.close()

    def drop_all(self) -> None:
        """Every connection there is gets a RST, as when a router forgets them."""
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._open])

    async def _run(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_READ, backlog=2048)
        self.url = "http://127.0.0.1:{1}".format(*server.sockets[0].getsockname())
        self._started.set()
        await self._end.wait()
        server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._open.add(task)
        self.n_connections += 1
        up, down = self.up, self.down
        outs = [client_out]
        try:
            server_in, server_out = await asyncio.open_connection(*self._target, limit=_READ)
            outs.append(server_out)
            ways = [_carry(client_in, server_out, up), _carry(server_in, client_out, down)]
            await _until_both_or_cut([asyncio.ensure_future(way) for way in ways])
        except asyncio.CancelledError:
            _reset(outs)
        except _Cut as cut:
            await _end(outs, reset=cut.reset)
        except OSError:
            _reset(outs)
        finally:
            for out in outs:
                out.close()
            self._open.discard(task)


class _Cut(Exception):
    def __init__(self, *, reset: bool) -> None:
        self.reset = reset


async def _until_both_or_cut(ways: list[asyncio.Task[None]]) -> None:
    """Each way may end with the FIN of its sender; a cut or an error of either ends both."""
    try:
        await asyncio.gather(*ways)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, toxics: Toxics) -> None:
    sent = 0
    while True:
        if sent == toxics.stall_after:
            await asyncio.Event().wait()
        bounds = [bound - sent for bound in (toxics.cut_after, toxics.stall_after) if bound is not None]
        if toxics.cut_after == sent:
            raise _Cut(reset=toxics.reset)
        data = await source.read(min([toxics.chunk, *bounds]))
        if not data:
            break
        if toxics.latency:
            await asyncio.sleep(toxics.latency)
        sink.write(data)
        await sink.drain()
        sent += len(data)
    sink.write_eof()


async def _end(outs: list[asyncio.StreamWriter], *, reset: bool) -> None:
    if reset:
        _reset(outs)
        return
    for out in outs:
        out.close()
    await asyncio.gather(*(out.wait_closed() for out in outs), return_exceptions=True)


def _reset(outs: list[asyncio.StreamWriter]) -> None:
    for out in outs:
        found = out.get_extra_info("socket")
        if found is not None and found.fileno() != -1:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        out.transport.abort()
