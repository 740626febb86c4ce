"""Many concurrent streams on one event loop in a thread: the events of each, with their times."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.client import Client, Exchange
from tests.support.servers import Server


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """What one client received of its stream."""

    body: bytes
    at: list[float]
    """Arrival times of tokens, in monotonic seconds."""

    @property
    def is_complete(self) -> bool:
        """Whether the stream ended with `done`, exactly once."""
        return self.body.count(b"event: done") == 1 and b"event: error" not in self.body

    @property
    def n_tokens(self) -> int:
        """Number of token events."""
        return self.body.count(b"event: token")

    @property
    def gaps(self) -> list[float]:
        """Seconds between arrivals, of which each is a token or more."""
        return [b - a for a, b in pairwise(self.at) if b > a]


async def read_stream(server: Server, request: dict[str, Any]) -> StreamRecord:
    """Reads one stream to its end."""
    client = Client(server.service.address)
    try:
        exchange = await client.run(Exchange(client.address.request("POST", "/complete", json.dumps(request).encode())))
        return StreamRecord(exchange.body, exchange.arrivals)
    finally:
        client.close()


def read_streams(server: Server, request: dict[str, Any], n: int) -> list[StreamRecord]:
    """Reads `n` concurrent streams."""

    async def all_of_them() -> list[StreamRecord]:
        return await asyncio.gather(*(read_stream(server, {**request, "seed": i}) for i in range(n)))

    return asyncio.run(all_of_them())


class Background:
    """`with Background(f, ...) as work: ...; work.result`: a call in a thread."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self._thread = threading.Thread(target=self._run)
        self._call, self._arguments = call, arguments
        self._result: Any = None

    def _run(self) -> None:
        self._result = self._call(*self._arguments)

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    @property
    def result(self) -> Any:
        """The call's result; waits for it."""
        self._thread.join()
        return self._result
