"""ASGI gateway in front of several replicas: forwards requests, broadcasts, retries after a lost replica.

whole responses            forwarded when complete; a lost replica only delays them
/complete, streamed        app/cluster/failover_stream.py: another replica continues the text
/v1, streamed              retried until the first text is sent; after that a lost replica ends them with an error
Replicas validate requests; the gateway only repeats authentication (app/http/auth.py), to reject a request without a
valid key before it reads any byte of the body.

/metrics merges the metrics of all replicas, with a label that names the replica of each sample.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from urllib.parse import parse_qs

from fastapi import Request
from prometheus_client import CollectorRegistry, Gauge, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.access.api_keys import ApiKeys
from app.api import health, static_pages
from app.api.metrics import CONTENT_TYPE, RENDER_RESERVE_SECONDS, RENDER_SHARE, SharedRendering, rendered_families
from app.api.native.resumable_stream import next_number
from app.api.resume_store import ResumeStore
from app.cluster.failover_stream import EventStream, FailoverStream, openai_frames
from app.cluster.messages import Call, FullResponse, Head, ReplicaLost
from app.cluster.replica_pool import ReplicaPool, ReplicaResponse
from app.cluster.retry import RetryCounters, RetryingRequest
from app.common.errors import RateLimitExceeded
from app.common.settings import Settings
from app.common.time_budget import TimeBudget
from app.http import sse
from app.http.auth import AuthMiddleware, public_routes, tenant_of
from app.http.best_effort import BestEffortTurns
from app.http.cors import CorsMiddleware
from app.http.disconnect import until_disconnect
from app.http.errors import ApiError, from_engine
from app.http.incoming_bodies import SMALL_BODY, IncomingBodies
from app.http.request_log import AccessRecord


class _MergedPages(Collector):
    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for server, page in sorted(self._pages.items()):
            for family in text_string_to_metric_families(page):
                metric = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                metric.samples += [s._replace(labels={**s.labels, "server": server}) for s in family.samples]
        return families.values()


class ReplicaTracker:
    """Tracks which replicas answered the last broadcast, and which only answered earlier ones."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._silent = Gauge(
            "inkstream_relay_silent_replicas",
            "Replicas that did not answer in time.",
            registry=registry,
        )
        self._responding = Gauge(
            "inkstream_relay_replica_answers",
            "1 if the replica answered the last broadcast, 0 if it only answered earlier ones.",
            ["server"],
            registry=registry,
        )
        self._known: set[str] = set()

    def update(self, names: Collection[str], n_silent: int) -> None:
        """Records the replicas that answered and how many did not; if all answered, forgets those of earlier calls."""
        self._known = self._known.union(names) if n_silent else set(names)
        self._silent.set(n_silent)
        self._responding.clear()
        for name in self._known:
            self._responding.labels(name).set(name in names)


async def broadcast(
    replicas: ReplicaPool, call: Call, seconds: float, *, is_enough: Callable[[FullResponse], bool] = lambda _: False
) -> tuple[list[FullResponse], int]:
    """Collects responses until one is enough or the timeout expires, then cancels the remaining calls.

    Returns the responses in the order of arrival, and how many replicas did not answer and are not known to be lost; 0
    if one response was enough.
    """
    tasks = replicas.broadcast(call)
    responses: list[FullResponse] = []
    try:
        async with asyncio.timeout(seconds):
            for next_response in asyncio.as_completed(tasks):
                with suppress(ReplicaLost):
                    responses.append(await next_response)
                    if is_enough(responses[-1]):
                        return responses, 0
    except TimeoutError:
        pass
    finally:
        n_silent = sum(not task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return responses, n_silent


_ATTEMPT_SECONDS = 2.0
"""Timeout of one replica for a request without a body, such as a health check; then another replica is tried."""
_BROADCAST_SECONDS = 2.0
"""Timeout of a broadcast: a replica that hangs must not delay the others' responses."""
_RETRY_AFTER = {"Retry-After": "5"}


class Gateway:
    """The gateway application; owned by the event loop of its process."""

    def __init__(
        self,
        settings: Settings,
        replicas: ReplicaPool,
        *,
        max_retries: int,
        best_effort: BestEffortTurns | None = None,
    ) -> None:
        """`best_effort`: of the connections that the gateway serves, whose work without a key waits for turns."""
        self._settings = settings
        self._replicas = replicas
        self._max_retries = max_retries
        self._resume_store = ResumeStore(settings.resume_seconds)
        self._counts = RetryCounters()
        self._tracker = ReplicaTracker(self._counts.registry)
        self._merged: dict[str, _MergedMetrics] = {}
        """By owner of the request, because a key may see its own usage only."""
        budget = TimeBudget(RENDER_SHARE, RENDER_RESERVE_SECONDS)
        self._new_merged = partial(_MergedMetrics, self._merge, budget, asyncio.Lock())
        self._has_keys = bool(settings.keys_file)
        self._bodies = IncomingBodies(settings.body_timeout / 2)
        keys = ApiKeys(settings.keys_file) if settings.keys_file else None
        public = public_routes([health.router, static_pages.router])
        authenticated = AuthMiddleware(self._serve, keys, public, best_effort)
        # CORS is handled here, because the gateway itself makes some responses: errors and resumed streams.
        self._http: ASGIApp = CorsMiddleware(authenticated, settings.origins) if settings.origins else authenticated

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        if scope["type"] == "lifespan":
            await _run_lifespan(receive, send)
        elif scope["type"] == "http":
            AccessRecord.get_or_create(scope)
            await self._http(scope, receive, send)
        else:
            raise RuntimeError("only HTTP is supported")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = AccessRecord.get_or_create(scope)
        try:
            call = await self._read(Request(scope, receive), record.request_id)
            response = await until_disconnect(self._route(call), receive)
        except (ApiError, RateLimitExceeded) as problem:
            error = problem if isinstance(problem, ApiError) else from_engine(problem)
            headers = {**error.headers, "X-Request-Id": record.public_id}
            response = JSONResponse(error.body(record.public_id), error.status, headers)
        if response:
            await response(scope, receive, send)

    async def _read(self, request: Request, request_id: str) -> Call:
        return Call(
            request_id=request_id,
            method=request.method,
            path=request.scope["path"],
            query=request.scope["query_string"],
            headers=tuple((bytes(name).lower(), bytes(value)) for name, value in request.scope["headers"]),
            body=await self._body(request),
        )

    async def _body(self, request: Request) -> bytes:
        """The body, truncated one byte above the limit, which is enough for a replica to reject it.

        Reserves memory while it arrives. Raises ApiError 400, 408, RateLimitExceeded.
        """
        if request.method != "POST":  # routes of other methods take no body, and some are public
            return b""
        body, limit, tenant = bytearray(), self._settings.max_body_bytes, tenant_of(request).cache_namespace
        size = min(limit, int(request.headers.get("content-length") or 0))
        try:
            async with asyncio.timeout(self._settings.body_timeout), AsyncExitStack() as reservation:
                await reservation.enter_async_context(self._bodies.reserved(tenant, size))
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        break
                    if not size and len(body) > SMALL_BODY:  # a chunked body declares no length
                        size = limit
                        await reservation.enter_async_context(self._bodies.reserved(tenant, limit))
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time: send it faster") from None
        except ClientDisconnect:
            raise ApiError(400, "the connection closed before the end of the body") from None
        return bytes(body[: limit + 1])

    async def _route(self, call: Call) -> Response:
        """Dispatches by method and path. Raises ApiError."""
        match call.method, call.path.split("/")[1:]:
            case "DELETE", ["complete", name]:
                return await self._cancel(call, name)
            case "GET", ["complete", name, "events"]:
                return await self._resume(call, name)
            case "GET", ["metrics"]:
                return await self._metrics(call)
        return await self._forward(call)

    async def _forward(self, call: Call) -> Response:
        request = RetryingRequest(
            self._replicas,
            call,
            self._counts,
            max_retries=self._max_retries,
            accept_timeout=self._settings.queue_timeout,
        )
        while True:
            try:
                async with asyncio.timeout(None if call.method == "POST" else _ATTEMPT_SECONDS):
                    return await self._forward_once(request)
            except (ReplicaLost, TimeoutError):  # after a timeout, another replica may respond
                self._record_loss(request)

    async def _forward_once(self, request: RetryingRequest) -> Response:
        """The response of the replica that accepts the request, streamed or whole. Raises ReplicaLost."""
        response = await request.send()
        if response.head.is_event_stream:
            return self._stream(request, response)
        try:
            return _unchanged(response.head, await response.body())
        finally:
            response.close()

    def _record_loss(self, request: RetryingRequest) -> None:
        try:
            request.record_loss(has_started=False)
        except ApiError:
            self._counts.failed.inc()
            raise

    def _stream(self, request: RetryingRequest, response: ReplicaResponse) -> Response:
        headers = _stream_headers(response.head)
        if request.call.path != "/complete":
            return EventStream(partial(openai_frames, request, response), lambda: None, headers, response)
        limit = self._settings.resume_bytes
        owner, alias = _owner(request.call), _callers_id(request.call)
        stream = FailoverStream(request, self._resume_store, owner=owner, replay_bytes=limit, alias=alias)
        subscription = stream.attach()
        frames = partial(stream.frames, subscription, response, 0)
        return EventStream(frames, partial(stream.detach, subscription), headers, response)

    async def _resume(self, call: Call, name: str) -> Response:
        """Resumes a stream. A replica checks the credentials first: it gets a resume of an id that no replica has."""
        probe = await self._forward(replace(call, path=f"/complete/{call.request_id}/events"))
        stream = self._resume_store.find(name, _owner(call))
        if probe.status_code != 404 or not isinstance(stream, FailoverStream):
            return probe
        number = _resume_number(call, stream.name)
        if number > stream.next_number:
            raise ApiError(
                400,
                f"Last-Event-ID must be at most {stream.next_number - 1}, the last event that was sent",
                param="Last-Event-ID",
            )
        if not stream.can_replay_from(number):
            raise ApiError(404, f"event {number} is no longer available: send the request again", code="events_gone")
        subscription = stream.attach()
        try:
            response = await stream.reconnect()
        except BaseException:  # an error, or the client disconnected again: it may reconnect
            stream.detach(subscription)
            raise
        detach, headers = partial(stream.detach, subscription), {"X-Request-Id": _public_id(call)}
        frames = partial(stream.frames, subscription, response, number)
        return EventStream(frames, detach, headers, response)

    async def _cancel(self, call: Call, name: str) -> Response:
        """Broadcasts the cancellation; does not wait for replicas that hang once one has cancelled."""
        found = self._resume_store.find(name, _owner(call))
        stream = found if isinstance(found, FailoverStream) else None  # otherwise another gateway's, or unknown
        targeted = replace(call, path=f"/complete/{stream.current_id}") if stream else call
        responses, n_silent = await broadcast(
            self._replicas, targeted, _BROADCAST_SECONDS, is_enough=lambda one: one.head.status == 200
        )
        statuses = {response.head.status for response in responses}
        was_running = stream and statuses <= {200, 404} and stream.cancel()
        if was_running or (stream and 200 in statuses):
            return JSONResponse({"id": name, "cancelled": True}, headers={"X-Request-Id": _public_id(call)})
        if n_silent and statuses <= {404} and not stream:
            raise ApiError(503, "a replica that may run this request does not answer: try again", headers=_RETRY_AFTER)
        _require(responses)
        # If no replica has the resource, all responses are equivalent.
        chosen = next((one for one in responses if one.head.status != 404), responses[0])
        return _unchanged(chosen.head, chosen.body)

    async def _metrics(self, call: Call) -> Response:
        # The pages are merged as Prometheus text, so no replica may answer in OpenMetrics.
        headers = tuple(header for header in call.headers if header[0] != b"accept")
        responses, n_silent = await broadcast(self._replicas, replace(call, headers=headers), _BROADCAST_SECONDS)
        _require(responses)
        for response in responses:
            if response.head.status != 200:
                return _unchanged(response.head, response.body)
        pages = {response.replica: response.body.decode() for response in responses}
        owner = _owner(call) if self._has_keys else ""  # the replicas have checked the credentials
        if owner not in self._merged:
            self._merged[owner] = self._new_merged()
        return Response(await self._merged[owner].text(pages, n_silent), headers={"Content-Type": CONTENT_TYPE})

    def _merge(self, pages: Mapping[str, str], n_silent: int) -> Iterator[bytes]:
        """The text of the replicas' pages and the gateway's own metrics, in parts."""
        self._tracker.update(pages, n_silent)
        merged = CollectorRegistry(auto_describe=False)
        merged.register(_MergedPages(pages))
        yield from rendered_families(merged, generate_latest)
        yield generate_latest(self._counts.registry)


class _MergedMetrics:
    """The replicas' metrics as one owner may see them: requests that arrive before a rendering begins share it."""

    def __init__(
        self, merge: Callable[[Mapping[str, str], int], Iterator[bytes]], budget: TimeBudget, turn: asyncio.Lock
    ) -> None:
        self._merge = merge
        self._scraped: tuple[Mapping[str, str], int] = ({}, 0)
        """The pages of the replicas that answered last, and how many did not."""
        self._rendering = SharedRendering(lambda: self._merge(*self._scraped), budget, turn)

    async def text(self, pages: Mapping[str, str], n_silent: int) -> bytes:
        """The text of these pages, or of later ones."""
        self._scraped = pages, n_silent
        return await self._rendering.text()


def _require(responses: list[FullResponse]) -> None:
    """Raises ApiError 503 if there are none."""
    if not responses:
        raise ApiError(503, "no replica answers: try again in a moment", headers=_RETRY_AFTER)


def _unchanged(head: Head, body: bytes) -> Response:
    """The replica's response, unchanged, including repeated headers."""
    response = Response(body, head.status)
    response.raw_headers = list(head.headers)
    return response


def _stream_headers(head: Head) -> dict[str, str]:
    """A replica's headers, except those of the event stream itself."""
    own = {name.lower() for name in sse.HEADERS}
    found = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
    return {name: value for name, value in found.items() if name not in own}


async def _run_lifespan(receive: Receive, send: Send) -> None:
    """ASGI lifespan protocol without startup or shutdown work."""
    for what in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{what}.complete"})


def _owner(call: Call) -> str:
    """The owner of a stream: its credentials, which a replica has checked, however the header spells them."""
    scheme, _, key = (call.header(b"authorization") or "").partition(" ")
    return hashlib.sha256(" ".join((scheme.lower(), key.strip(" \t"))).encode()).hexdigest()


def _callers_id(call: Call) -> str:
    """The X-Request-Id that the caller sent; empty for none."""
    return AccessRecord.get_or_create({"headers": call.headers}).callers_id


def _public_id(call: Call) -> str:
    return _callers_id(call) or call.request_id


def _resume_number(call: Call, name: str) -> int:
    """The number of the event to resume a stream from. Raises ApiError 400."""
    after = parse_qs(call.query.decode("latin-1")).get("after")
    last_event_id = call.header(b"last-event-id")
    if last_event_id is not None or not after:
        return next_number(name, last_event_id)
    if not re.fullmatch("-1|[0-9]{1,9}", after[-1]):
        raise ApiError(400, "after: must be the number of an event of this stream", param="after")
    return int(after[-1]) + 1
