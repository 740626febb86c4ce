"""Retries a request on another replica when its replica is lost."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter

from app.cluster.messages import Call
from app.cluster.replica_pool import ReplicaPool, ReplicaResponse
from app.http.errors import ApiError
from app.http.request_log import new_request_id

_log = logging.getLogger("inkstream.relay")


class RetryCounters:
    """Counters of requests whose replica was lost; one object per gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.resent = self._counter("resent", "Requests retried on another replica before their response started.")
        self.replayed = self._counter("replayed", "Streams continued on another replica.")
        self.failed = self._counter("failed", "Requests that failed because their replicas were lost.")

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"inkstream_relay_{name}", text, registry=self.registry)


async def read_error(response: ReplicaResponse) -> ApiError:
    """Reads the error that a replica sent instead of a stream, and closes the response. Raises ReplicaLost."""
    try:
        error = json.loads(await response.body())["error"]
    finally:
        response.close()
    retry_after = response.head.header(b"retry-after")
    headers = {"Retry-After": retry_after} if retry_after else None
    return ApiError(response.head.status, error["message"], param=error["param"], code=error["code"], headers=headers)


class RetryingRequest:
    """Limits the retries of a request: a request that several replicas died with may be the cause."""

    def __init__(
        self, replicas: ReplicaPool, call: Call, counts: RetryCounters, *, max_retries: int, accept_timeout: float
    ) -> None:
        self.call = call
        self.counts = counts
        self.current_id: str | None = None
        """The request id on the current or last replica."""
        self._replicas = replicas
        self._retries_left = max_retries
        self._accept_timeout = accept_timeout

    def record_loss(self, *, has_started: bool) -> None:
        """Records a lost replica. Raises ApiError 503 if the request must not be retried."""
        if not self._retries_left:
            raise ApiError(
                503, "all replicas that had this request were lost: try again in a moment", headers={"Retry-After": "5"}
            )
        self._retries_left -= 1
        (self.counts.replayed if has_started else self.counts.resent).inc()
        _log.warning("request %s lost its replica: retrying on another one", self.call.request_id)

    async def send(self, call: Call | None = None) -> ReplicaResponse:
        """Sends the request and waits for the response's head. Raises ReplicaLost; ApiError 503 if none accepts it."""
        call = call or self.call
        if self.current_id:
            call = replace(call, request_id=new_request_id())
            _log.info("request %s continues as %s", self.call.request_id, call.request_id)
        self.current_id = call.request_id
        try:
            async with asyncio.timeout(self._accept_timeout):
                response = await self._replicas.send(call)
        except TimeoutError:
            message = "no replica is available for this request: try again in a moment"
            raise ApiError(503, message, headers={"Retry-After": "5"}) from None
        try:
            await response.read_head()
        except BaseException:
            response.close()
            raise
        return response
