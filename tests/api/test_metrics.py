"""/metrics: HTTP requests by route and status, limits, processes, versions, and both formats."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from app.common.startup_timer import PHASES, PROVING, STARTING
from app.common.version import VERSION
from app.http.request_log import RejectConnection, RequestCounts
from tests.support import ROOT
from tests.support.async_test import async_test
from tests.support.completion_client import fetch_completion
from tests.support.keyed_server import raw_request, send_raw
from tests.support.servers import Server
from tests.support.services import Services

LIMITS = ("--max-running", "3", "--max-waiting", "70", "--max-waiting-tokens", "900", "--max-connections", "50")
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.3"


@pytest.fixture(scope="module")
def fake(serve_module: Services) -> Server:
    return serve_module(*LIMITS, fake_ms=1)


def _samples(server: Server, name: str) -> Iterator[tuple[dict[str, str], float]]:
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text):
        yield from ((sample.labels, sample.value) for sample in family.samples if sample.name == name)


def _requests(server: Server) -> dict[tuple[str, str, str], float]:
    samples = _samples(server, "inkstream_http_requests_total")
    return {(labels["method"], labels["route"], labels["status"]): value for labels, value in samples}


def test_requests_are_counted_by_method_route_and_status(fake: Server) -> None:
    before = _requests(fake)
    for path in ("/one", "/two", "/complete/req-1/later"):
        assert httpx.get(f"{fake.url}{path}").status_code == 404
    assert httpx.get(f"{fake.url}/complete").status_code == 405
    assert httpx.request("BREW", f"{fake.url}/complete").status_code == 400
    assert httpx.get(f"{fake.url}/complete/req-1/events").status_code == 404
    for body in ({"prompt": "a", "max_tokens": 2}, {"prompt": "a", "max_tokens": 2, "stream": False}):
        assert httpx.post(f"{fake.url}/complete", json=body).status_code == 200
    assert httpx.post(f"{fake.url}/complete", content=b"{").status_code == 415
    send_raw(fake.url, raw_request("GET", "/health", "Host: localhost", "Content-Length: no"))
    counted = {series: value - before.get(series, 0) for series, value in _requests(fake).items()}
    assert {series: value for series, value in counted.items() if value and series[1] != "/metrics"} == {
        ("GET", "none", "404"): 3,
        ("GET", "/complete", "405"): 1,
        ("none", "none", "400"): 2,  # malformed heads never reach the application
        ("GET", "/complete/{request_id}/events", "404"): 1,
        ("POST", "/complete", "200"): 2,
        ("POST", "/complete", "415"): 1,
    }


@async_test
async def test_connection_beyond_the_limits_is_counted() -> None:
    counts = RequestCounts()
    transport = httpx.ASGITransport(app=RejectConnection(lambda *_: None, counts))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/complete")).status_code == 503
    assert counts == {("GET", "none", 503): 1}


def test_every_limit_is_exported_with_the_value_it_limits(fake: Server) -> None:
    fetch_completion(fake.url, prompt="a", max_tokens=1)  # the engine reports its blocks with a step
    limits = {name: fake.metric(f"{name}_limit") for name in ("requests_running", "requests_waiting", "connections")}
    assert limits == {"requests_running": 3, "requests_waiting": 70, "connections": 50}
    assert (fake.metric("prompt_tokens_waiting"), fake.metric("prompt_tokens_waiting_limit")) == (0, 900)
    assert fake.metric("kv_cache_blocks") > fake.metric("kv_cache_blocks_used") == 0
    assert fake.metric("connections") == 1


def test_load_is_what_runs_and_waits_of_what_can_run(fake: Server) -> None:
    """Three slots: six sequences are a load of 2, whatever part of them runs; none is a load of 0."""
    body = {"prompt": "a", "n": 6, "max_tokens": 1000, "ignore_eos": True, "stream": False}
    with ThreadPoolExecutor(1) as pool:
        response = pool.submit(httpx.post, f"{fake.url}/complete", json=body, timeout=60)
        assert fake.wait_for(lambda: fake.metric("load_ratio") == 2, 10)
        assert response.result().status_code == 200
    assert fake.wait_for(lambda: fake.metric("load_ratio") == 0, 10)


def test_metrics_report_processes_and_versions(fake: Server) -> None:
    ((_, resident),) = _samples(fake, "process_resident_memory_bytes")
    ((_, started),) = _samples(fake, "process_start_time_seconds")
    ((engine, engine_resident),) = _samples(fake, "inkstream_engine_process_resident_memory_bytes")
    ((_, engine_cpu),) = _samples(fake, "inkstream_engine_process_cpu_seconds_total")
    assert resident > 2e7 and engine_resident > 5e6 and engine_cpu > 0 and started > 1e9
    assert engine == {"replica": "0"}
    ((info, one),) = _samples(fake, "inkstream_build_info")
    numbers = {"version": VERSION, "python": platform.python_version(), "torch": version("torch")}
    assert one == 1 and info == {**numbers, "numerics": "fake"}


def test_engine_start_is_measured_by_phase_only(server: Server) -> None:
    """Its other messages, such as the result of the self-test, belong to the phase in which they arrive."""
    phases = [labels["phase"].replace("_", " ") for labels, _ in _samples(server, "inkstream_engine_start_seconds")]
    assert phases[0] == STARTING and PROVING in phases and set(phases) <= set(PHASES)


def test_openmetrics_is_served_on_request(fake: Server) -> None:
    page = httpx.get(f"{fake.url}/metrics", headers={"Accept": OPENMETRICS})
    assert page.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    names = {family.name for family in parse_openmetrics(page.text)}
    assert {"inkstream_http_requests", "inkstream_build", "process_cpu_seconds"} <= names


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain", "application/json", "text/plain;version=no", "\x80;;,q=x"])
def test_default_format_is_text(fake: Server, accept: str) -> None:
    page = httpx.get(f"{fake.url}/metrics", headers={"Accept": accept.encode("latin-1")})
    assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "# EOF" not in page.text


def test_observability_page_lists_exactly_the_exposed_metrics(fake: Server) -> None:
    families = text_string_to_metric_families(httpx.get(f"{fake.url}/metrics").text)
    exposed = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    section = (ROOT / "docs/observability.md").read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0]
    cells = "\n".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    named = {name for name in re.findall(r"`([a-z_]+)`", cells) if not name.startswith("inkstream_replica_")}
    assert {name for name in exposed if not name.endswith("_created")} == named
