"""Many concurrent streams on one event loop in a thread: the events of each, with their times."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.support.http.raw_client import post
from tests.support.servers import Server


@dataclass
class Told:
    """What came of one stream."""

    body: bytes = b""
    at: list[float] = field(default_factory=list)
    """When something arrived, in monotonic seconds."""

    @property
    def is_complete(self) -> bool:
        """Whether it ended as it should, exactly once."""
        return self.body.count(b"event: done") == 1 and b"event: error" not in self.body

    @property
    def n_tokens(self) -> int:
        """Events of text."""
        return self.body.count(b"event: token")

    @property
    def gaps(self) -> list[float]:
        """Seconds between arrivals, of which each is a token or more."""
        return [b - a for a, b in zip(self.at[1:], self.at[2:], strict=False)]


async def read_stream(server: Server, request: dict[str, Any]) -> Told:
    """One stream to its end."""
    parts = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    told, pieces = Told(), []
    try:
        writer.write(post(request, "/complete", "Connection: close"))
        while piece := await reader.read(65536):
            told.at.append(time.monotonic())
            pieces.append(piece)
    except ConnectionError:
        pass
    finally:
        writer.close()
    told.body = b"".join(pieces)
    return told


def read_streams(server: Server, request: dict[str, Any], n: int) -> list[Told]:
    """`n` of them at once."""

    async def all_of_them() -> list[Told]:
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
        """Waits for it."""
        self._thread.join()
        return self._result
