"""Runs the service on two local Ray nodes and breaks them under load: make ray. Takes minutes; no part of make test.

The reference is the completion of each seed when nothing is broken. The last check but one is the control: without
resends the same kill must lose requests, or no check could fail.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from app.http.sse import Event, EventParser
from tests.ray.cluster import PROXY_URL, URL, TwoNodes, apply_settings, samples, servers, wait_until
from tests.support import ROOT
from tests.support.concurrent_readers import ConcurrentReaders, Reader

_SCALE_SECONDS = 240.0
BODY = {"prompt": "Once upon a time", "max_tokens": 80, "ignore_eos": True}


def _clients(count: int = 24) -> ConcurrentReaders:
    """Clients of every kind, each with its own seed."""
    paths = (["/complete"] * 14 + ["/v1/completions"] * 4 + ["/complete"] * 6)[:count]
    bodies = [{**BODY, "seed": seed, "stream": seed < 18} for seed in range(len(paths))]
    return ConcurrentReaders(URL, [Reader(body, path) for body, path in zip(bodies, paths, strict=True)])


@dataclass(slots=True)
class Row:
    """A row of the table."""

    what: str
    requests: int = 0
    waiting: int = 0
    """Requests without text when something broke."""
    whole: int = 0
    """Requests with the reference text."""
    resent: float = 0
    replayed: float = 0
    errors: int = 0
    """Ended with an error event."""
    lost: int = 0
    """Had no text yet and got no response, or were cut without an error."""
    seconds: float = 0


def read_while(breaking: Callable[[], None], what: str, texts: dict[int, str]) -> Row:
    """Breaks something while concurrent clients read. Raises AssertionError if a completion differs."""
    before = {name: _count(name) for name in ("resent", "replayed")}
    began, clients = time.monotonic(), _clients()
    wait_until(lambda: clients.streaming >= 6, 60, "no stream has started")
    breaking()
    broken = time.monotonic()
    clients.join()
    row = Row(what, len(clients.readers), seconds=time.monotonic() - began)
    row.resent, row.replayed = (_count(name) - before[name] for name in ("resent", "replayed"))
    for reader in clients.readers:
        _judge(reader, row, texts, broken)
    return row


def _judge(reader: Reader, row: Row, texts: dict[int, str], broken: float) -> None:
    waited = not reader.at or reader.began + reader.at[0] > broken
    row.waiting += waited
    seed, text = reader.body["seed"], reader.texts.get(0, "")
    assert texts.get(seed, text).startswith(text), f"completion differs: {reader}"
    assert reader.numbers == list(range(len(reader.numbers))), f"events are missing: {reader}"
    if reader.end == "done":
        assert text == texts.setdefault(seed, text), f"incomplete: {reader}"
        row.whole += 1
        return
    row.errors += reader.end == "error"
    row.lost += waited or reader.end != "error"
    if reader.end != "error":
        print("  cut without an error:", reader)


def _count(name: str) -> float:
    return sum(samples(f"relay_{name}_total").values())


def disconnect_and_resume(texts: dict[int, str]) -> None:
    """Disconnects a client: its request stops until the client reconnects for the rest."""
    events: list[Event] = []
    with httpx.stream("POST", f"{URL}/complete", json={**BODY, "seed": 0}, timeout=60) as response:
        parser = EventParser()
        for data in response.iter_bytes():
            events += parser.feed(data)
            if len(events) > 8:
                break
    wait_until(lambda: sum(samples("requests_running").values()) == 0, 10, "a canceled request still runs")
    last = [event.id for event in events if event.id][-1]
    rest = httpx.get(
        f"{URL}/complete/{last.rpartition(':')[0]}/events", headers={"Last-Event-ID": last}, timeout=60
    ).content
    tokens = [event for event in (*events, *EventParser().feed(rest)) if event.name == "token"]
    assert "".join(json.loads(event.data)["text"] for event in tokens) == texts[0], (
        "the completion differs after a reconnect"
    )


def check(nodes: TwoNodes) -> list[Row]:
    """Runs all scenarios in turn. Raises AssertionError."""
    nodes.deploy(resends=2)
    nodes.wait_for_replicas(2)
    texts: dict[int, str] = {}
    rows = [read_while(lambda: None, "nothing breaks", texts)]
    assert rows[0].whole == rows[0].requests
    disconnect_and_resume(texts)
    rows.append(read_while(nodes.kill_replica, "a replica is killed", texts))
    nodes.wait_for_replicas(2)
    nodes.deploy(resends=0)
    nodes.wait_for_replicas(2)
    rows.append(read_while(nodes.kill_replica, "the same, no resends", texts))
    nodes.wait_for_replicas(2)
    nodes.deploy(resends=2)
    nodes.wait_for_replicas(2)
    rows.append(read_while(nodes.remove_node, "a node is removed", texts))
    assert len(servers()) == 1
    assert httpx.get(f"{PROXY_URL}/health/ready", timeout=20).status_code == 200, "Ray's proxy reaches the gateway, too"
    rows.append(scale(nodes, texts))
    return rows


def scale(nodes: TwoNodes, texts: dict[int, str]) -> Row:
    """Scales from one replica to three for 24 clients, and back to one for two. Raises AssertionError."""
    nodes.deploy(replicas=1, most_replicas=3, upscale_seconds=1, downscale_seconds=3, cpus=0.3)
    nodes.wait_for_replicas(1)
    row, began = Row("1 replica to 3 to 1"), time.monotonic()
    for count, replicas in ((24, 3), (2, 1)):
        while len(servers()) != replicas:
            assert time.monotonic() - began < _SCALE_SECONDS, f"there are never {replicas} replicas"
            clients = _clients(count)
            clients.join()
            row.requests += count
            for reader in clients.readers:
                _judge(reader, row, texts, time.monotonic())
    row.seconds = time.monotonic() - began
    return row


def table(rows: list[Row]) -> str:
    """The results as a readable table."""
    head = (
        f"{'':22}{'requests':>9}{'waiting':>9}{'whole':>7}{'resent':>8}{'replayed':>9}{'error':>7}{'lost':>6}{'s':>7}"
    )
    lines = [
        f"{row.what:22}{row.requests:9}{row.waiting:9}{row.whole:7}{row.resent:8.0f}{row.replayed:9.0f}"
        f"{row.errors:7}{row.lost:6}{row.seconds:7.1f}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def verdict(rows: list[Row]) -> list[str]:
    """The problems found, or none."""
    _, killed, control, node, scaled = rows
    wrong = [f"{row.what}: {row.lost} requests were lost" for row in (killed, node) if row.lost]
    wrong += [f"{row.what}: nothing had to be replayed" for row in (killed, node) if not row.replayed]
    wrong += [f"{row.what}: nothing had to be sent again" for row in (killed, node) if not row.resent]
    if scaled.whole < scaled.requests:
        wrong.append(f"{scaled.what}: {scaled.requests - scaled.whole} requests were not complete")
    if not control.lost:
        wrong.append("without resends nothing was lost either: this test cannot fail")
    return wrong


def main() -> int:
    """Returns 0 if no request was lost and no process is left."""
    apply_settings(str(ROOT / "weights"))
    nodes = TwoNodes()
    try:
        rows = check(nodes)
        print(table(rows))
        wrong = verdict(rows)
    finally:
        left = nodes.stop()
    wrong += [f"still running: {command}" for command in left]
    print("\n".join(wrong) or "no request was lost, and nothing is left running")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
