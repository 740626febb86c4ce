"""Traces of requests, as a collector on loopback receives them from a service."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support import ROOT
from tests.support.completion_client import parse_events
from tests.support.processes import children
from tests.support.servers import Server
from tests.support.services import Services

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra traces")
if TYPE_CHECKING:
    from tests.support.otlp_collector import Collected, Collector

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE[::-1]}-{PARENT}-00"
FAST = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    from tests.support.otlp_collector import otlp_collector

    with otlp_collector() as running:
        yield running


@pytest.fixture(scope="module")
def traced(serve_module: Services, collector: Collector) -> Server:
    return serve_module("--traces", fake_ms=2, environment={**FAST, ENDPOINT: collector.url})


def _id(response: httpx.Response) -> str:
    return response.headers["x-request-id"]


def _of(collector: Collector, name: str, request_id: str) -> Collected:
    """The span of this request."""
    deadline = time.monotonic() + 30
    while True:
        found = [s for s in collector.spans if s.name == name and s.attributes["inkstream.request_id"] == request_id]
        if found:
            assert len(found) == 1
            return found[0]
        assert time.monotonic() < deadline, [span.name for span in collector.spans]
        time.sleep(0.02)


def _post(server: Server, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{server.url}/complete", json={"prompt": "Once", "max_tokens": 5, **body}, headers=headers, timeout=60
    )


@pytest.mark.parametrize("is_streamed", [True, False])
def test_request_is_one_span_with_its_phases_as_children(
    traced: Server, collector: Collector, is_streamed: bool
) -> None:
    before = time.time_ns()
    headers = {"traceparent": SAMPLED, "tracestate": "vendor=1", "baggage": "secret=word"}
    response = _post(traced, headers, stream=is_streamed, n=2)
    span = _of(collector, "POST /complete", _id(response))
    assert (span.trace_id, span.parent, span.is_error) == (TRACE, PARENT, False)
    assert before <= span.start <= span.end <= time.time_ns()
    expected = {
        "http.request.method": "POST", "http.route": "/complete", "http.response.status_code": 200,
        "gen_ai.usage.input_tokens": 2, "gen_ai.usage.output_tokens": 10, "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.request.max_tokens": 5, "gen_ai.request.choice.count": 2, "inkstream.outcome": "ok",
    }  # fmt: skip
    assert {name: span.attributes.get(name) for name in expected} == expected
    assert span.resource["service.name"] == "inkstream" and span.resource["service.version"]
    assert "secret" not in str(span) and "Once" not in str(span)
    phases = collector.children(span)
    assert list(phases) == ["admission", "tokenize", "queue", "prefill", "decode"], phases
    times = [(phase.start, phase.end) for phase in phases.values()]
    assert all(end == start for (_, end), (start, _) in pairwise(times))
    assert span.start <= times[0][0] and times[-1][1] <= span.end
    assert phases["decode"].end - phases["decode"].start > 4e6, "four more steps of 2 ms"


def test_sampling_flag_and_trace_context_are_respected(traced: Server, collector: Collector) -> None:
    _post(traced, {"traceparent": NOT_SAMPLED})
    broken = _post(traced, {"traceparent": "00-no-01"})
    span = _of(collector, "POST /complete", _id(broken))
    assert span.parent == "" and span.trace_id != TRACE
    repeated = [("traceparent", SAMPLED), ("traceparent", SAMPLED)]
    again = httpx.post(f"{traced.url}/complete", json={"prompt": "a", "max_tokens": 1}, headers=repeated)
    assert _of(collector, "POST /complete", _id(again)).parent == ""
    assert NOT_SAMPLED.split("-")[1] not in {span.trace_id for span in collector.spans}


def test_refused_requests_have_a_span_and_other_routes_have_none(traced: Server, collector: Collector) -> None:
    """Requests refused before they started have a span and no completion; probes and unknown paths have none."""
    for path in ("/health/ready", "/metrics", "/", "/unknown"):
        httpx.get(f"{traced.url}{path}")
    invalid = _post(traced, min_tokens=9)
    assert invalid.status_code == 400
    span = _of(collector, "POST /complete", _id(invalid))
    assert (span.attributes["http.response.status_code"], span.is_error) == (400, False)
    assert list(collector.children(span)) == ["admission", "tokenize"]
    tokens = httpx.post(f"{traced.url}/tokenize", json={"text": "a"})
    assert not collector.children(_of(collector, "POST /tokenize", _id(tokens)))
    assert {span.name for span in collector.spans if not span.parent} <= {"POST /complete", "POST /tokenize"}


def test_resumed_stream_has_a_new_span_linked_to_the_first(traced: Server, collector: Collector) -> None:
    body = {"prompt": "Once", "max_tokens": 400}
    with httpx.stream("POST", f"{traced.url}/complete", json=body, timeout=60) as response:
        name = _id(response)
        next(response.iter_bytes())
    assert traced.wait_for(lambda: traced.metric("requests_running") == 0)
    assert not [s for s in collector.spans if s.attributes.get("inkstream.request_id") == name]
    resumed = httpx.get(f"{traced.url}/complete/{name}/events?after=-1", timeout=60)
    assert parse_events(resumed.text)[-1].name == "done"
    first = _of(collector, "POST /complete", name)
    second = _of(collector, "GET /complete/{request_id}/events", _id(resumed))
    assert second.links == [first.span_id]
    assert first.events == ["client disconnected", "client resumed the stream"]
    assert first.attributes["gen_ai.usage.output_tokens"] == 400


def test_engine_crash_is_an_event_and_no_error(traced: Server, collector: Collector) -> None:
    body = {"prompt": "Once", "max_tokens": 500}
    with httpx.stream("POST", f"{traced.url}/complete", json=body, timeout=60) as response:
        pieces = response.iter_bytes()
        next(pieces)
        (engine,) = [pid for pid in children(traced.process.pid) if "fake_engine" in _command(pid)]
        os.kill(engine, signal.SIGKILL)
        assert b"event: done" in b"".join(pieces)
    span = _of(collector, "POST /complete", _id(response))
    assert span.events == ["engine crashed"] and not span.is_error
    assert span.attributes["gen_ai.usage.output_tokens"] == 500


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_histograms_and_the_log_refer_to_the_trace(traced: Server, collector: Collector) -> None:
    response = _post(traced)
    trace = _of(collector, "POST /complete", _id(response)).trace_id
    page = httpx.get(f"{traced.url}/metrics", headers={"Accept": "application/openmetrics-text"}).text
    for name in ("time_to_first_token", "request_duration", "queue_duration", "prefill_duration"):
        found = re.findall(rf'^inkstream_{name}_seconds_bucket{{.*trace_id="([0-9a-f]+)"', page, re.M)
        assert trace in found, name
    assert traced.has_logged(f'"trace_id": "{trace}"')


def test_spans_of_the_last_requests_are_exported_before_the_service_ends(serve: Services, collector: Collector) -> None:
    late = {"OTEL_BSP_SCHEDULE_DELAY": "60000", ENDPOINT: collector.url, "OTEL_SERVICE_NAME": "other"}
    server = serve("--traces", fake_ms=1, environment=late)
    name = _id(_post(server))
    server.process.terminate()
    assert server.process.wait(30) == 0
    assert _of(collector, "POST /complete", name).resource["service.name"] == "other"


def test_unreachable_collector_delays_nothing(serve: Services) -> None:
    server = serve("--traces", fake_ms=1, environment={**FAST, ENDPOINT: "http://127.0.0.1:9"})
    assert _post(server).status_code == 200
    began = time.monotonic()
    server.process.terminate()
    assert server.process.wait(60) == 0
    assert time.monotonic() - began < 20
    assert "Traceback" not in server.log.read_text()


def test_span_carries_the_callers_request_id(traced: Server, collector: Collector) -> None:
    headers = {"traceparent": SAMPLED, "X-Request-Id": "from-the-caller"}
    response = httpx.post(f"{traced.url}/complete", json={"prompt": "a", "max_tokens": 1}, headers=headers, timeout=60)
    assert _id(response) == "from-the-caller"
    assert _of(collector, "POST /complete", "from-the-caller")


def test_missing_packages_are_one_line_that_names_the_extra() -> None:
    code = "import sys; sys.modules['opentelemetry.sdk'] = None; from app.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", "--port", "0", "--traces"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment, cwd=ROOT
    )
    remedy = "install inkstream with the extra traces (in a checkout: .venv/bin/python -m pip install -e '.[traces]')"
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2 and f"error: --traces needs packages of OpenTelemetry: {remedy}" in line, line
