"""R22: Streams come through nginx with its default settings: at once, and through silence longer than its patience."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.completion_client import parse_events, text_of
from tests.support.http.nginx import needs_nginx, running_nginx
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

pytestmark = [needs_nginx, pytest.mark.usefixtures("silence")]
SHORT: dict[str, Any] = {"prompt": "a", "max_tokens": 20, "ignore_eos": True, "seed": 1}


@contextmanager
def _nginx(folder: Path, server: Server, extra: str = "") -> Iterator[str]:
    """nginx with its default settings but for its port and upstream."""
    location = f"location / {{ proxy_pass {server.url}; }}"
    with running_nginx(folder, f"server {{ listen 127.0.0.1:PORT; {extra} {location} }}") as url:
        yield url


def _answer_of(url: str) -> tuple[float, str]:
    """Seconds until the stream arrived, and its bytes as received."""
    began = time.monotonic()
    answer = httpx.post(f"{url}/complete", json={**SHORT, "max_tokens": 1}, timeout=60)
    return time.monotonic() - began, answer.text


@pytest.fixture(scope="module")
def silence(serve_module: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[tuple[float, str]]]:
    """An answer that is silent for longer than nginx waits; it is under way while the other tests run."""
    server = serve_module("--engine-silence", "60", fake_ms=16_500, is_killed=True)
    folder = tmp_path_factory.mktemp("silence")
    with _nginx(folder, server, "proxy_read_timeout 15s;") as url, ThreadPoolExecutor(1) as thread:
        yield thread.submit(_answer_of, url)


def _first_token(url: str) -> tuple[float, list[float]]:
    """Seconds to the first token, and the arrival times of the others."""
    began, at = time.monotonic(), []
    with httpx.stream("POST", f"{url}/complete", json=SHORT, timeout=30) as response:
        for line in response.iter_lines():
            if line == "event: token":
                at.append(time.monotonic() - began)
    return at[0], at


@pytest.mark.timed
def test_the_first_byte_comes_at_once_and_tokens_one_by_one(serve: Services, tmp_path: Path, promise: Promise) -> None:
    server = serve(fake_ms=30)
    with _nginx(tmp_path, server) as url:

        def latest() -> tuple[float, float]:
            later, spread = [], []
            for _ in range(5):
                direct, _ = _first_token(server.url)
                proxied, at = _first_token(url)
                later.append(proxied - direct)
                spread.append(at[-1] - at[0])
            return max(later), min(spread)

        later, spread = promise.measured(latest, lambda found: found[0] <= 0.2 and found[1] > 0.4)
        assert spread > 0.4, "20 tokens of 30 ms were not meant to come in one piece"
        promise.at_most("first token through nginx, later than without", later, target=0.2, unit="s", n=5)
        for path in ("/", "/docs", "/v1/models"):
            assert httpx.get(f"{url}{path}").status_code == 200


def test_a_silence_longer_than_the_read_time_out_is_survived(
    silence: Future[tuple[float, str]], promise: Promise
) -> None:
    seconds, answer = silence.result()
    assert seconds > 16
    events = parse_events(answer)
    assert (events[-1].name, bool(text_of(events))) == ("done", True)
    assert ": ping" in answer
    promise.all_of("silence of 16 s survives a read time-out of 15 s", 1, 1)
