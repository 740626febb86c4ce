"""ASGI gateway in front of several replicas: forwards requests, broadcasts, retries after a lost replica.

whole responses            forwarded when complete; a lost replica costs only time
/complete, streamed        app/cluster/failover_stream.py: another replica continues the text
/v1, streamed              retried until the first text is sent, after that ended with an error
Replicas validate requests; the gateway only repeats authentication (app/http/auth.py), to refuse a request without a
valid key before any byte of its body is read.

/metrics merges the metrics of all replicas, with a label that names the replica of each sample.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
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
from app.api.metrics import CONTENT_TYPE
from app.api.native.routes import next_number
from app.api.resume_store import ResumeStore
from app.cluster.failover_stream import (
    EventStream,
    Reader,
    RelayedStream,
    as_it_is,
    best,
    headers_of,
    let_go,
    openai_frames,
)
from app.cluster.messages import Call, ReplicaLost, Replicas, Whole
from app.cluster.retry import Counts, ReplicaAnswer, RetryingRequest
from app.common.settings import Settings
from app.http import sse
from app.http.access_record import AccessRecord
from app.http.auth import AuthMiddleware, public_routes
from app.http.errors import ApiError
from app.http.host_filter import CorsMiddleware


class _Pages(Collector):
    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for server, page in sorted(self._pages.items()):
            for family in text_string_to_metric_families(page):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                merged.samples += [s._replace(labels={**s.labels, "server": server}) for s in family.samples]
        return families.values()


class Presence:
    """Tracks which replicas answered the last broadcast, and which did only earlier."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._silent = Gauge(
            "inkstream_relay_silent_replicas",
            "Replicas that did not answer in time.",
            registry=registry,
        )
        self._answers = Gauge(
            "inkstream_relay_replica_answers",
            "1 where the replica answered with the others, 0 where it did only before.",
            ["server"],
            registry=registry,
        )
        self._known: set[str] = set()

    def note(self, names: Collection[str], silent: int) -> None:
        """Records the replicas that answered and the number that did not; if all did, forgets earlier ones."""
        self._known = self._known.union(names) if silent else set(names)
        self._silent.set(silent)
        self._answers.clear()
        for name in self._known:
            self._answers.labels(name).set(name in names)


def merged(pages: Mapping[str, str], own: CollectorRegistry) -> bytes:
    """pages: Prometheus text by replica name. own: the gateway's metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Pages(pages))
    return generate_latest(registry) + generate_latest(own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The responses that arrived in time, in order of arrival."""

    answers: list[Whole]
    silent: int
    """Replicas that did not answer and are not known to be lost; 0 if one response was enough."""


async def ask_everyone(
    replicas: Replicas, call: Call, seconds: float, *, is_enough: Callable[[Whole], bool] = lambda _: False
) -> Heard:
    """Collects responses until one is `enough` or the timeout expires, then cancels the remaining calls."""
    asked: list[asyncio.Task[Whole]] = []
    answers: list[Whole] = []
    try:
        async with asyncio.timeout(seconds):
            asked = await replicas.ask_all(call)
            for coming in asyncio.as_completed(asked):
                try:
                    answers.append(await coming)
                except ReplicaLost:
                    continue
                if is_enough(answers[-1]):
                    return Heard(answers=answers, silent=0)
    except TimeoutError:
        pass
    finally:
        silent = sum(not task.done() for task in asked)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    return Heard(answers=answers, silent=silent)


_QUICK_SECONDS = 2.0
"""Timeout of a replica for a page or its health; then another replica is tried."""
_TOGETHER_SECONDS = 2.0
"""Timeout of a broadcast: a replica that hangs must not delay the others' responses."""
_SOON = {"Retry-After": "5"}


class Gateway:
    """The gateway application; owned by the event loop of its process."""

    def __init__(self, settings: Settings, replicas: Replicas, *, resends: int) -> None:
        self._settings = settings
        self._replicas = replicas
        self._resends = resends
        self._shelf = ResumeStore(settings.resume_seconds)
        self._counts = Counts()
        self._presence = Presence(self._counts.registry)
        keys = ApiKeys(settings.keys_file) if settings.keys_file else None
        gate = AuthMiddleware(self._serve, keys, public_routes([health.router, static_pages.router]))
        # CORS is handled here, because some responses are the gateway's own: its errors, resumed streams.
        self._http: ASGIApp = CorsMiddleware(gate, settings.origins) if settings.origins else gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            AccessRecord.begin_in(scope)
            await self._http(scope, receive, send)
        else:
            raise RuntimeError("only HTTP is served")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = AccessRecord.begin_in(scope).request_id
        try:
            call = await self._read(Request(scope, receive), request_id)
            response = await sse.until_disconnect(self._answer(call), receive, discard=let_go)
        except ApiError as error:
            headers = {**error.headers, "X-Request-Id": request_id}
            response = JSONResponse(error.body(request_id), error.status, headers)
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
        """The body, cut off one byte above the limit, which is enough for a replica to refuse it."""
        if request.method != "POST":  # no other method has a body, and some of those routes are public
            return b""
        body, most = bytearray(), self._settings.max_body_bytes
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                async for piece in request.stream():
                    body += piece
                    if len(body) > most:
                        break
        except TimeoutError:
            raise ApiError(408, "the body took too long: send it faster") from None
        except ClientDisconnect:
            raise ApiError(400, "the connection closed before the end of the body") from None
        return bytes(body[: most + 1])

    async def _answer(self, call: Call) -> Response:
        """Raises ApiError."""
        match call.method, call.path.split("/")[1:]:
            case "DELETE", ["complete", name]:
                return await self._cancel(call, name)
            case "GET", ["complete", name, "events"]:
                return await self._resume(call, name)
            case "GET", ["metrics"]:
                return await self._metrics(call)
        return await self._pass_on(call)

    async def _pass_on(self, call: Call) -> Response:
        asking = RetryingRequest(
            self._replicas, call, self._counts, resends=self._resends, patience=self._settings.queue_timeout
        )
        while True:
            try:
                async with asyncio.timeout(None if call.method == "POST" else _QUICK_SECONDS):
                    return await self._from_one(asking)
            except (ReplicaLost, TimeoutError):  # after a timeout another replica may not hang
                self._lost(asking)

    async def _from_one(self, asking: RetryingRequest) -> Response:
        """The response of the replica that accepts the request, streamed or whole. Raises ReplicaLost."""
        answer = await asking.begin()
        if answer.head.is_event_stream:
            return self._stream(asking, answer)
        try:
            return as_it_is(answer.head, await answer.body())
        finally:
            await answer.close()

    def _lost(self, asking: RetryingRequest) -> None:
        try:
            asking.lost(has_begun=False)
        except ApiError:
            self._counts.failed.inc()
            raise

    def _stream(self, asking: RetryingRequest, answer: ReplicaAnswer) -> Response:
        headers = headers_of(answer.head)
        if asking.call.path != "/complete":
            return EventStream(openai_frames(asking, answer), lambda: None, headers, answer)
        stream = RelayedStream(asking, owner=_owner(asking.call), journal_bytes=self._settings.resume_bytes)
        self._shelf.put(stream)
        reader = self._attach(stream)
        return EventStream(stream.frames(reader, answer), partial(self._leave, stream, reader), headers, answer)

    def _attach(self, stream: RelayedStream) -> Reader:
        self._shelf.come_back(stream)
        return stream.attach()

    def _leave(self, stream: RelayedStream, reader: Reader) -> None:
        if stream.detach(reader):
            self._shelf.leave(stream)

    async def _resume(self, call: Call, name: str) -> Response:
        """Resumes a stream after a replica has checked the credentials, under an id that no replica knows."""
        refusal = await self._pass_on(replace(call, path=f"/complete/{call.request_id}/events"))
        stream = self._shelf.find(name, _owner(call))
        if refusal.status_code != 404 or not isinstance(stream, RelayedStream):
            return refusal
        number = _first_wanted(call, name)
        if number > stream.next_number:
            raise ApiError(400, f"the last event that was sent is {stream.next_number - 1}", param="Last-Event-ID")
        if not stream.keeps(number):
            raise ApiError(404, f"event {number} is no longer kept: send the request again", code="events_gone")
        reader = self._attach(stream)
        try:
            answer = await stream.again()
        except BaseException:  # an error, or the client disconnected again: it may reconnect
            self._leave(stream, reader)
            raise
        leave, headers = partial(self._leave, stream, reader), {"X-Request-Id": call.request_id}
        return EventStream(stream.frames(reader, answer, number), leave, headers, answer)

    async def _cancel(self, call: Call, name: str) -> Response:
        """Broadcasts the cancellation; does not wait for replicas that hang once one has cancelled."""
        found = self._shelf.find(name, _owner(call))
        stream = found if isinstance(found, RelayedStream) else None  # otherwise another gateway's, or unknown
        asked = replace(call, path=f"/complete/{stream.current_id}") if stream else call
        heard = await ask_everyone(
            self._replicas, asked, _TOGETHER_SECONDS, is_enough=lambda one: one.head.status == 200
        )
        statuses = {answer.head.status for answer in heard.answers}
        was_running = stream and statuses <= {200, 404} and stream.stop()
        if was_running or (stream and 200 in statuses):
            return JSONResponse({"id": name, "cancelled": True}, headers={"X-Request-Id": call.request_id})
        if heard.silent and statuses <= {404} and not stream:
            raise ApiError(503, "a replica that may have it does not answer: try again in a moment", headers=_SOON)
        return best(_some(heard))

    async def _metrics(self, call: Call) -> Response:
        heard = await ask_everyone(self._replicas, call, _TOGETHER_SECONDS)
        for answer in _some(heard):
            if answer.head.status != 200:
                return as_it_is(answer.head, answer.body)
        pages = {answer.replica: answer.body.decode() for answer in heard.answers}
        self._presence.note(pages, heard.silent)
        return Response(merged(pages, self._counts.registry), headers={"Content-Type": CONTENT_TYPE})


def _some(heard: Heard) -> list[Whole]:
    """The responses, at least one. Raises ApiError 503."""
    if not heard.answers:
        raise ApiError(503, "no replica answers: try again in a moment", headers=_SOON)
    return heard.answers


async def _live(receive: Receive, send: Send) -> None:
    """ASGI lifespan protocol without startup or shutdown work."""
    for what in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{what}.complete"})


def _owner(call: Call) -> str:
    """The owner of a stream: its credentials, which a replica has checked."""
    return hashlib.sha256((call.header(b"authorization") or "").encode("latin-1")).hexdigest()


def _first_wanted(call: Call, name: str) -> int:
    """The number of the event to resume a stream from. Raises ApiError 400."""
    after = parse_qs(call.query.decode("latin-1")).get("after")
    last_event_id = call.header(b"last-event-id")
    if last_event_id is not None or not after:
        return next_number(name, last_event_id)
    if not re.fullmatch("-1|[0-9]{1,9}", after[-1]):
        raise ApiError(400, "after: must be the number of an event of this stream", param="after")
    return int(after[-1]) + 1
