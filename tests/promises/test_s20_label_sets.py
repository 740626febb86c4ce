"""The label sets of the metrics stay the same whatever callers make up: no name of theirs becomes a series."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from conftest import Server, start_server, stop_server
from keyed import exchange, raw
from prometheus_client.parser import text_string_to_metric_families
from promise import Promise

WORDS = {
    "finish_reason": {"stop", "length", "timeout", "cancelled", "error", "disconnected"},
    "reason": {"queue_full", "not_ready", "busy", "failed", "invalid"},
}
"""What a label may say; a reason that is added later stands in docs/api.md and here."""


@pytest.fixture(scope="module")
def abused(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[Server]:
    running = start_server(tmp_path_factory.mktemp("abused"), weights, fake_ms=1)
    yield running
    assert stop_server(running) == 0


def _series(server: Server) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    return {(s.name, tuple(sorted(s.labels.items()))) for family in families for s in family.samples}


def _abuse(server: Server) -> None:
    """Every place where a label could come from, with a name that nobody has sent before."""
    new = secrets.token_hex(8)
    host = "Host: localhost"
    for head in (
        raw(f"M{new}".upper(), "/health", host), raw("GET", f"/{new}", host), raw("GET", f"/web/{new}", host),
        raw("GET", "/health", f"Host: {new}"), raw("GET", "/health", f"Host: {new}.example"),
        raw("GET", f"/metrics?name={new}", host), raw("GET", "/metrics", host, f"Authorization: Bearer {new}"),
        raw("GET", f"/complete/{new}/events", host), raw("DELETE", f"/complete/{new}", host),
        f"{new}\r\n\r\n".encode(),
    ):  # fmt: skip
        exchange(server.url, head)
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


def test_nobody_can_make_a_new_series(abused: Server, promise: Promise) -> None:
    _abuse(abused)
    before = _series(abused)
    rounds = promise.size(10, 300)
    for _ in range(rounds):
        _abuse(abused)
    promise.at_most("S20", "series that abuse has added", len(_series(abused) - before), target=0, n=rounds)
    labels = {(name, value) for _, labels in before for name, value in labels if name != "le"}
    assert labels, "there are series with labels"
    assert all(value in WORDS[name] for name, value in labels), labels


def test_the_check_finds_a_label_that_is_made_up(abused: Server) -> None:
    """The control: a metric that is labelled by what was sent has one more series for each word."""
    text = 'inkstream_requests_total{finish_reason="length"} 1\n'
    names = {
        s.labels["finish_reason"]
        for f in text_string_to_metric_families(text.replace("length", "evil"))
        for s in f.samples
    }
    assert not names <= WORDS["finish_reason"]
    assert _series(abused)
