"""A service with two engines keeps the promises of one. Fake engines, except where completions are compared."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.armed_faults import Faults
from tests.support.load.concurrent_clients import RequestSpec, concurrent_requests, engine_pids, is_ready, send_all
from tests.support.processes import is_stopped
from tests.support.servers import Server, is_clean, start_server, stop_server

pytestmark = pytest.mark.slow

_TEXT: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0}


def _streams(count: int, **extra: Any) -> list[RequestSpec]:
    """Streams whose prompts have nothing in common, so that they alternate between engines."""
    return [RequestSpec(body={**_TEXT, "prompt": chr(97 + i) * 40, "seed": i, **extra}) for i in range(count)]


def _of(server: Server, index: int, what: str) -> float:
    return server.metric(f'replica_{what}{{replica="{index}"}}')


def _stopped(server: Server) -> list[int]:
    """The pids of stopped engines."""
    return [pid for pid in engine_pids(server) if is_stopped(pid)]


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    """Faults that tests inject into `pair`."""
    return Faults(tmp_path / "faults")


@pytest.fixture
def pair(tmp_path: Path, weights: Path, faults: Faults) -> Iterator[Server]:
    """A service with two fake engines of four slots each."""
    flags = ("--replicas", "2", "--max-running", "4")
    server = start_server(tmp_path, weights, *flags, fake_ms=10, environment=faults.environment)
    yield server
    assert stop_server(server) == 0


def test_crash_of_one_engine_pauses_only_its_streams(pair: Server, faults: Faults) -> None:
    requests = [
        *_streams(5, max_tokens=300),
        RequestSpec(body={**_TEXT, "prompt": "f" * 40, "seed": 5, "max_tokens": 301}),
    ]
    expected = [response.output() for response in send_all(pair, requests)]
    # It does not divide the free memory: the other engines have theirs, and a share of the rest may be too small.
    faults.arm("fake.load", "stop", times=1, match="concurrent_loaders=0")
    faults.arm("engine.step", "stop", after=100, times=1, match="max_tokens=301,")
    with concurrent_requests(pair, requests) as responses:
        assert pair.wait_for(lambda: bool(_stopped(pair)))
        (victim,) = _stopped(pair)  # stops half-way until the test continues it
        (survivor,) = set(engine_pids(pair)) - {victim}
        os.kill(victim, signal.SIGKILL)
        assert pair.wait_for(lambda: bool(_stopped(pair)) and victim not in _stopped(pair))
        assert pair.metric("engine_restarts_total") == 1 and is_ready(pair)
        (newcomer,) = send_all(pair, [RequestSpec(body={**_TEXT, "prompt": "z", "max_tokens": 5, "seed": 1})])
        assert newcomer.status == 200
        # Three streams end while the three of the crashed engine are paused.
        assert pair.wait_for(lambda: sum(b"event: done" in response.body[-2000:] for response in responses) == 3)
        assert {_of(pair, index, "ready") for index in (0, 1)} == {0, 1}
        assert is_ready(pair)
        assert httpx.get(f"{pair.url}/v1/models").json()["data"][0]["device"] == "2 x none"
        (successor,) = set(engine_pids(pair)) - {survivor}
        os.kill(successor, signal.SIGCONT)
    assert [response.output() for response in responses] == expected
    assert pair.metric("replayed_requests_total") == 3
    assert is_clean(pair)


def test_two_real_engines_give_the_output_of_one(tmp_path: Path, weights: Path, server: Server, faults: Faults) -> None:
    """Requests to all endpoints with choices, log-probabilities and shared prompts, spread over both engines.

    Each engine stops itself at its tenth step, so that both are at work whenever the test looks.
    """
    one: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 30, "seed": 5}
    requests = [
        *_streams(6, max_tokens=60),
        *[
            RequestSpec(body={**_TEXT, "prompt": "The fox sang to the moon, and", "seed": i, "max_tokens": 30})
            for i in range(6)
        ],
        RequestSpec(body={**one, "n": 3, "logprobs": 2}),
        RequestSpec(body={**one, "stream": False, "echo": True, "logprobs": 1}),
        RequestSpec(body={**one, "prompt": ["one", "two", "three"]}),
        RequestSpec(path="/v1/completions", body={**one, "best_of": 3, "n": 2}),
        RequestSpec(path="/score", body={"prompt": ["A fox and the moon", "An owl"], "logprobs": 2}),
    ]
    expected = [response.output() for response in send_all(server, requests)]
    flags = ("--dtype", "float32", "--replicas", "2", "--threads", "2")
    pair = start_server(tmp_path, weights, *flags, environment=faults.environment)
    try:
        faults.arm("engine.step", "stop", after=10)
        with concurrent_requests(pair, requests) as responses:
            assert pair.wait_for(lambda: len(_stopped(pair)) == 2)
            faults.disarm("engine.step")
            for engine in engine_pids(pair):
                os.kill(engine, signal.SIGCONT)
        assert [response.output() for response in responses] == expected
        assert "2 x " in httpx.get(f"{pair.url}/v1/models").json()["data"][0]["device"]
    finally:
        assert stop_server(pair) == 0
