"""The label sets of the metrics stay the same, whatever clients send: no value of theirs becomes a series."""

from __future__ import annotations

import re
import secrets

import httpx
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.keyed_server import raw_request, send_raw
from tests.support.promise_figures import Promise
from tests.support.servers import Server

_VALUES = {
    "le": r"[0-9.]+|\+Inf",
    "method": r"[A-Z]{3,7}|other|none",
    "route": r"none|/[a-z0-9_./{}:]*",
    "status": r"[0-9]{3}",
    "replica": r"[0-9]+",
    "key": r"",
}
"""Label -> pattern, for labels whose values are not words."""


def _series(server: Server) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return _series_in(httpx.get(f"{server.url}/metrics").text)


def _series_in(text: str) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))) for family in families for s in family.samples}


def _abuse(server: Server) -> None:
    """Send a new name to every source of a label."""
    new = secrets.token_hex(8)
    host = "Host: localhost"
    for head in (
        raw_request(f"M{new}".upper(), "/health", host), raw_request("GET", f"/{new}", host),
        raw_request("GET", f"/web/{new}", host),
        raw_request("GET", "/health", f"Host: {new}"), raw_request("GET", "/health", f"Host: {new}.example"),
        raw_request("GET", f"/metrics?name={new}", host),
        raw_request("GET", "/health", host, f"X-Request-Id: {new}"),
        raw_request("GET", "/metrics", host, f"Authorization: Bearer {new}"),
        raw_request("GET", f"/v1/models/{new}", host), raw_request("GET", f"/complete/{new}/events", host),
        raw_request("DELETE", f"/complete/{new}", host),
        f"{new}\r\n\r\n".encode(),
    ):  # fmt: skip
        send_raw(server.url, head)
    body = {"prompt": new, "max_tokens": 2, "user": new, "request_id": new}
    for others in (
        {},
        {"stop": [new]},
        {"model": new},
        {new: new},
        {"max_tokens": new},
        {"prompt": new * 2000},
        {"seed": int(new, 16) >> 2},
    ):
        for path in ("/complete", "/v1/completions", "/score"):
            httpx.post(f"{server.url}{path}", json={**body, **others}, headers={"User-Agent": new}, timeout=30)


def test_clients_cannot_add_time_series(fake_server: Server, promise: Promise) -> None:
    _abuse(fake_server)
    before = _series(fake_server)
    rounds = promise.size(10, 300)
    for _ in range(rounds):
        _abuse(fake_server)
    promise.at_most("time series added by abuse", len(_series(fake_server) - before), target=0, n=rounds)
    labels = {label for series, labels in before for label in labels if series != "inkstream_build_info"}
    odd = {(name, value) for name, value in labels if not re.fullmatch(_VALUES.get(name, r"[a-z_]{2,30}"), value)}
    assert labels and not odd, odd
    assert {("route", "none"), ("status", "404"), ("method", "none")} <= labels, "the abuse must reach the counter"


def test_labels_from_client_input_are_detected() -> None:
    """Control: a counter labeled with client input gets a new series per word."""
    registry = CollectorRegistry()
    counter = Counter("requests", "By user.", ("user",), registry=registry)
    found = []
    for word in ("a", "b"):
        counter.labels(word).inc()
        found.append(_series_in(generate_latest(registry).decode()))
    assert found[1] - found[0]
