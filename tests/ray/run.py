"""Runs the service on two local Ray nodes and breaks them under load: make ray. Takes minutes; no part of make test.

The reference is the completion of each seed when nothing is broken. The clients that only read are the control: the
kill that clients survive which resume must cut them, or no check could fail.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import click
import httpx
import pytest

from deploy.ray_serve import build
from tests.ray.clients import BODY, Client, Clients
from tests.ray.cluster import URL, TwoNodes, apply_settings, running_replicas, wait_until
from tests.support import ROOT
from tests.support.fake_hub import fake_hub

_MODEL = "org/default"
"""The default weights as a model of the Hub, which every replica downloads by its name."""
_SCALE_SECONDS = 240.0
_KINDS = random.Random(0).sample(["resuming", "plain", "v1", "whole"], 24, counts=[12, 4, 4, 4])
"""In no order: Ray may send every second request to the same replica."""


def _clients(count: int = len(_KINDS)) -> Clients:
    """Clients of every kind, each with its own seed."""
    return Clients(URL, [Client(kind, seed) for seed, kind in enumerate(_KINDS[:count])])


@dataclass(slots=True)
class Row:
    """A row of the table."""

    what: str
    requests: int = 0
    whole: int = 0
    """Requests with the reference text."""
    broken: int = 0
    """Requests of clients that resume, or ask again, without the whole text."""
    cut: int = 0
    """Streams of clients that only read, without the whole text."""
    seconds: float = 0


def read_while(breaking: Callable[[], None], what: str, texts: dict[int, str]) -> Row:
    """Breaks something while concurrent clients read. Raises AssertionError if a completion differs."""
    began, clients = time.monotonic(), _clients()
    wait_until(lambda: clients.streaming >= 6, 60, "no stream has started")
    breaking()
    clients.join()
    row = Row(what, seconds=time.monotonic() - began)
    for client in clients.clients:
        _judge(client, row, texts)
    return row


def _judge(client: Client, row: Row, texts: dict[int, str]) -> None:
    row.requests += 1
    text = texts.get(client.seed, client.text)
    assert text.startswith(client.text), f"completion differs: {client}"
    if client.end == "done":
        assert client.text == texts.setdefault(client.seed, client.text), f"incomplete: {client}"
        row.whole += 1
    elif client.kind in ("resuming", "whole"):
        print("  broken:", client)
        row.broken += 1
    else:
        row.cut += 1


def check(nodes: TwoNodes) -> list[Row]:
    """Runs all scenarios in turn. Raises AssertionError."""
    refuse_arguments_of_the_gateway()
    nodes.deploy()
    nodes.wait_for_replicas(2)
    assert httpx.get(f"{URL}/v1/models", timeout=20).json()["data"][0]["id"] == _MODEL
    texts: dict[int, str] = {}
    rows = [read_while(lambda: None, "nothing breaks", texts)]
    assert rows[0].whole == rows[0].requests, rows[0]
    rows.append(read_while(nodes.kill_replica, "a replica is killed", texts))
    nodes.wait_for_replicas(2)
    rows.append(read_while(nodes.remove_node, "a node is removed", texts))
    rows.append(scale(nodes, texts))
    return rows


def refuse_arguments_of_the_gateway() -> None:
    """Arguments that earlier versions had are refused with what replaces them."""
    for name in ("fronts", "port", "resends"):
        with pytest.raises(click.UsageError, match="the gateway, which is gone"):
            build({name: 1})


def scale(nodes: TwoNodes, texts: dict[int, str]) -> Row:
    """Scales from one replica to three for 24 clients, and back to one for two. Raises AssertionError."""
    nodes.deploy(replicas=1, most_replicas=3, upscale_seconds=1, downscale_seconds=3, cpus=0.3)
    nodes.wait_for_replicas(1)
    stop_with_the_client()
    row, began = Row("1 replica to 3 to 1"), time.monotonic()
    for count, replicas in ((len(_KINDS), 3), (2, 1)):
        while running_replicas() != replicas:
            assert time.monotonic() - began < _SCALE_SECONDS, f"there are never {replicas} replicas"
            clients = _clients(count)
            clients.join()
            for client in clients.clients:
                _judge(client, row, texts)
    row.seconds = time.monotonic() - began
    return row


def stop_with_the_client() -> None:
    """The only replica stops a request whose client has disconnected. Raises AssertionError."""
    try:
        httpx.post(f"{URL}/complete", json={**BODY, "max_tokens": 480, "stream": False}, timeout=1)
        raise AssertionError("480 tokens within a second: no client disconnects")
    except httpx.ReadTimeout:
        wait_until(lambda: "\ninkstream_requests_running 0.0" in _metrics(), 2, "the request of a lost client runs on")


def _metrics() -> str:
    return httpx.get(f"{URL}/metrics", timeout=20).text


def table(rows: list[Row]) -> str:
    """The results as a readable table."""
    head = f"{'':22}{'requests':>9}{'whole':>7}{'broken':>8}{'cut':>6}{'s':>7}"
    lines = [f"{row.what:22}{row.requests:9}{row.whole:7}{row.broken:8}{row.cut:6}{row.seconds:7.1f}" for row in rows]
    return "\n".join([head, *lines])


def verdict(rows: list[Row]) -> list[str]:
    """The problems found, or none."""
    _, killed, node, scaled = rows
    wrong = [f"{row.what}: {row.broken} requests are not whole" for row in rows if row.broken]
    if not killed.cut + node.cut:
        wrong.append("no stream of a client that only reads was cut, so this test cannot fail")
    if scaled.cut:
        wrong.append(f"{scaled.what}: {scaled.cut} streams were cut")
    return wrong


def main() -> int:
    """Returns 0 if every client that resumes got the whole text, and no process is left."""
    with fake_hub() as hub, TemporaryDirectory() as home:
        hub.repositories[_MODEL] = {path.name: path.read_bytes() for path in (ROOT / "weights").iterdir()}
        os.environ.update(HF_ENDPOINT=hub.url, HF_HOME=home)
        apply_settings(_MODEL)
        nodes = TwoNodes()
        try:
            rows = check(nodes)
            print(table(rows))
            wrong = verdict(rows)
        finally:
            left = nodes.stop()
    wrong += [f"still running: {command}" for command in left]
    print("\n".join(wrong) or "every client that resumes got the whole text, and nothing is left running")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
