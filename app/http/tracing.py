"""OpenTelemetry traces: a span for each request, exported as the OTEL_* variables say. Imported only with --traces.

A span costs nothing while its request runs: the phases of a completion are spans that are made at its end, from the
timestamps that it has anyway. No span and no event contains text of a client.

    POST /complete             from the first byte of the request to the end of the response and of the completion
      admission tokenize [grammar] queue prefill decode
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

_UNTRACED_TAG = "operations"
"""Routes whose requests are not traced: health checks, metrics. Nor are pages, which are not in the API's schema."""
_CONTEXT_HEADERS = (b"traceparent", b"tracestate")
_FLUSH_SECONDS = 2.0
"""Time that spans have to reach the collector when the service ends."""
_propagator = TraceContextTextMapPropagator()

Phase = tuple[str, float, float, Mapping[str, Any]]
"""Name, start and end in monotonic seconds, attributes."""


class Tracing:
    """Creates the traces of requests and exports them in a separate thread."""

    def __init__(self, environment: Mapping[str, str], version: str) -> None:
        attributes = {"service.version": version}
        if "service.name=" not in environment.get("OTEL_RESOURCE_ATTRIBUTES", "") and not environment.get(
            "OTEL_SERVICE_NAME"
        ):
            attributes["service.name"] = "inkstream"
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("inkstream", version)

    def request(self, scope: Scope, started: float) -> RequestTrace:
        """The trace of a request that arrived at `started`, in monotonic seconds."""
        return RequestTrace(self._tracer, scope, started)

    def close(self) -> None:
        """Exports the remaining spans; gives up after a moment if the collector does not answer."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_FLUSH_SECONDS)


class RequestTrace:
    """The spans of one request; its span ends with the response or the completion, whichever is later."""

    def __init__(self, tracer: Tracer, scope: Scope, started: float) -> None:
        self._tracer = tracer
        self._scope = scope
        self._started = started
        self._span: Span | None = None
        self._links: list[Link] = []
        self._is_held = self._has_response_ended = False

    @property
    def exemplar(self) -> dict[str, str] | None:
        """Labels that point from a metric to this trace; None if it is not exported."""
        if self._span is None or not (context := self._span.get_span_context()).trace_flags.sampled:
            return None
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

    def start(self) -> None:
        """Starts the span; the sampler decides here whether it is exported."""
        self._offset = time.time_ns() - round(time.monotonic() * 1e9)
        found = [(key, value) for key, value in self._scope["headers"] if key in _CONTEXT_HEADERS]
        # Two contexts (RFC 9110 allows a proxy to merge or repeat headers) say nothing reliable.
        carrier = (
            {} if len(found) > len(dict(found)) else {key.decode(): value.decode("latin-1") for key, value in found}
        )
        method, route = self._scope["method"], self._scope["route"].path
        self._span = self._tracer.start_span(
            f"{method} {route}",
            _propagator.extract(carrier, Context()),
            SpanKind.SERVER,
            {"http.request.method": method, "http.route": route},
            self._links,
            self._time(self._started),
        )

    def hold(self) -> None:
        """A completion has begun: the span stays open until end_completion()."""
        self._is_held = True

    def link(self, other: RequestTrace) -> None:
        """Links this request, which has no span yet, to the one whose stream it resumes."""
        if other._span is not None:
            self._links.append(Link(other._span.get_span_context()))

    def add(self, attributes: Mapping[str, Any], phases: Sequence[Phase]) -> None:
        """Adds attributes and child spans."""
        if self._span is None or not self._span.is_recording():
            return
        self._span.set_attributes(attributes)
        context = set_span_in_context(self._span, Context())
        for name, start, end, own in phases:
            child = self._tracer.start_span(name, context, attributes=own, start_time=self._time(start))
            child.end(self._time(max(start, end)))

    def end_completion(self, incidents: Sequence[tuple[float, str]], error: str | None) -> None:
        """The completion has ended; `error` is set if the server is to blame."""
        self._is_held = False
        if self._span is None:
            return
        for at, name in incidents:
            self._span.add_event(name, timestamp=self._time(at))
        if error:
            self._fail(error)
        if self._has_response_ended:
            self._span.end()

    def end_response(self, request_id: str, key: str | None, status: int, outcome: str) -> None:
        """The response has ended, or the client has left."""
        if self._span is None:
            route = self._scope.get("route")
            if not getattr(route, "include_in_schema", False) or _UNTRACED_TAG in getattr(route, "tags", ()):
                return
            self.start()
        assert self._span
        self._has_response_ended = True
        self._span.set_attributes(
            {"http.response.status_code": status, "inkstream.request_id": request_id, "inkstream.outcome": outcome}
        )
        if key:
            self._span.set_attribute("inkstream.key", key)
        if status >= 500:
            self._fail(outcome)
        if not self._is_held:
            self._span.end()

    def _fail(self, error: str) -> None:
        assert self._span
        self._span.set_attribute("error.type", error)
        self._span.set_status(Status(StatusCode.ERROR, error))

    def _time(self, monotonic_seconds: float) -> int:
        """Nanoseconds since 1970."""
        return self._offset + round(monotonic_seconds * 1e9)
