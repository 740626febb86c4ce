"""Retries a request on another replica when its replica is lost."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter

from app.cluster.messages import Call, Head, Part, ReplicaLost, Replicas, Taken
from app.http.access_record import new_request_id
from app.http.errors import ApiError

_log = logging.getLogger("inkstream.relay")


class Counts:
    """Counters of requests whose replica was lost; one object per gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.resent = self._counter("resent", "Requests that went to another replica before their answer had begun.")
        self.replayed = self._counter("replayed", "Streams that went on with another replica.")
        self.failed = self._counter("failed", "Requests that no other replica could save: their clients were told.")

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"inkstream_relay_{name}", text, registry=self.registry)


class ReplicaAnswer:
    """One replica's response. The caller must always call close(), which also stops the replica."""

    def __init__(self, head: Head, parts: AsyncGenerator[Part, None]) -> None:
        self.head = head
        self._parts = parts

    async def next(self) -> bytes | None:
        """The next chunk of the body; None after the last. Raises ReplicaLost."""
        part = await anext(self._parts, None)
        assert part is None or isinstance(part, bytes)
        return part

    async def body(self) -> bytes:
        """The rest of the body. Raises ReplicaLost."""
        pieces = []
        while (piece := await self.next()) is not None:
            pieces.append(piece)
        return b"".join(pieces)

    async def refusal(self) -> ApiError:
        """Reads an error response that came in place of a stream, to its end. Raises ReplicaLost."""
        try:
            error = json.loads(await self.body())["error"]
        finally:
            await self.close()
        later = {"Retry-After": when} if (when := self.head.header(b"retry-after")) else None
        return ApiError(self.head.status, error["message"], param=error["param"], code=error["code"], headers=later)

    async def close(self) -> None:
        """Discards the rest of the response."""
        await self._parts.aclose()


class RetryingRequest:
    """Limits the retries of a request: one on which several replicas died may be the cause."""

    def __init__(self, replicas: Replicas, call: Call, counts: Counts, *, resends: int, patience: float) -> None:
        self.call = call
        self.counts = counts
        self.current_id: str | None = None
        """The request id on the current or last replica."""
        self._replicas = replicas
        self._left = resends
        self._patience = patience

    def lost(self, *, has_begun: bool) -> None:
        """Records a lost replica. Raises ApiError 503 if the request must not be retried."""
        if not self._left:
            raise ApiError(
                503, "the replicas that had this request are gone: try again in a moment", headers={"Retry-After": "5"}
            )
        self._left -= 1
        (self.counts.replayed if has_begun else self.counts.resent).inc()
        _log.warning("request %s lost its replica and is sent to another one", self.call.request_id)

    async def begin(self, call: Call | None = None) -> ReplicaAnswer:
        """Sends the request until its head arrives. Raises ReplicaLost, and ApiError 503 if no replica accepts it."""
        call = call or self.call
        if self.current_id:
            call = replace(call, request_id=new_request_id())
            _log.info("request %s goes on as %s", self.call.request_id, call.request_id)
        self.current_id = call.request_id
        parts = self._replicas.ask(call)
        try:
            try:
                async with asyncio.timeout(self._patience):
                    taken = await anext(parts)
            except TimeoutError:
                message = "no replica is there for this request: try again in a moment"
                raise ApiError(503, message, headers={"Retry-After": "5"}) from None
            assert isinstance(taken, Taken)
            head = await anext(parts)
            assert isinstance(head, Head)
        except StopAsyncIteration:
            raise ReplicaLost from None
        except BaseException:
            await parts.aclose()
            raise
        return ReplicaAnswer(head, parts)
