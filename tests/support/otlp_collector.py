"""An OpenTelemetry collector on loopback: receives and stores spans by OTLP over HTTP (protobuf)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Collected:
    """A received span."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    start: int
    """Unix time in nanoseconds."""
    end: int
    attributes: dict[str, Any]
    events: list[str]
    links: list[str]
    """Ids of spans."""
    is_error: bool
    resource: dict[str, Any]


@dataclass
class Collector:
    """The received spans."""

    url: str
    spans: list[Collected] = field(default_factory=list)

    def children(self, parent: Collected) -> dict[str, Collected]:
        """The child spans of `parent`, by name, in order of their start."""
        below = [span for span in self.spans if (span.trace_id, span.parent) == (parent.trace_id, parent.span_id)]
        return {span.name: span for span in sorted(below, key=lambda span: span.start)}


@contextlib.contextmanager
def otlp_collector() -> Iterator[Collector]:
    """Runs a collector on a free port for the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
            collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield collector
        server.shutdown()


def _spans(request: Any) -> Iterator[Collected]:
    for group in request.resource_spans:
        for scope in group.scope_spans:
            for span in scope.spans:
                yield Collected(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    start=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    attributes=_values(span.attributes),
                    events=[event.name for event in span.events],
                    links=[link.span_id.hex() for link in span.links],
                    is_error=span.status.code == 2,
                    resource=_values(group.resource.attributes),
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
