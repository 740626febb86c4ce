"""What `inkstream check` refuses is never served, neither at the start nor after a reload, and `/health/ready` is 503
while the service fails every request. One poisoned request, sent again and again, changes nothing.

The kinds of bad weights are R19's, loaded by the real engine with a tiny model. The last test runs the fake
engine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.cli import check
from app.serving.failure_monitor import FAILURES, RECHECK_SECONDS
from tests.support import ROOT
from tests.support.armed_faults import Faults
from tests.support.model.bad_weights import BAD, KV_BLOCKS, bad_weights, good_weights
from tests.support.promise_figures import Promise
from tests.support.reloads import has_reloaded, point_link, refusal_lines
from tests.support.servers import Server, kernels
from tests.support.services import Services

_TM = ("--dtype", "float32", "--threads", "1", "--kv-blocks", str(KV_BLOCKS))
_IN_EVERY_RUN = ("numbers that explode", "norms of 1e30", "an encoder that explodes")
"""Kinds tested with start and reload in every run (all kinds at full size); R19 reloads others in every run."""
_DEPENDS_ON_FLAGS = ("a model that does not fit",)
_BODY = {"prompt": "The fox", "max_tokens": 5, "temperature": 0, "stream": False}


def _start(weights: Path) -> tuple[int, str]:
    """Exit code and last output line of a start that fails."""
    command = [sys.executable, "-m", "app", "serve", "--weights", str(weights), "--port", "0", *_TM]
    environment = {**os.environ, **kernels()}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return ended.returncode, (ended.stderr or ended.stdout).splitlines()[-1]


def _statuses(server: Server, count: int, **changes: Any) -> set[int]:
    return {httpx.post(f"{server.url}/complete", json={**_BODY, **changes}).status_code for _ in range(count)}


def _ready(server: Server) -> httpx.Response:
    return httpx.get(f"{server.url}/health/ready")


def test_check_start_and_reload_refuse_the_same_weights(
    serve: Services, tmp_path: Path, promise: Promise, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = [kind for kind in BAD if kind not in _DEPENDS_ON_FLAGS]
    good, link = good_weights(tmp_path / "good", 0), tmp_path / "current"
    link.symlink_to(good)
    refused: list[str] = []
    server = serve(*_TM, weights=link)
    version = httpx.get(f"{server.url}/v1/models").json()["data"][0]["weights_version"]
    for index, kind in enumerate(kinds):
        words, bad = BAD[kind][1], bad_weights(tmp_path / f"bad-{index}", good, kind)
        assert check.main([str(bad)]) == 2, kind
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1, kind
        if not promise.full and kind not in _IN_EVERY_RUN:
            continue
        code, last = _start(bad)
        assert code == 2 and last.startswith("error: ") and words in last and str(bad) in last, (kind, code, last)
        point_link(link, bad)
        assert has_reloaded(server, "refused"), kind
        assert server.wait_for(lambda: len(refusal_lines(server)) > len(refused)), kind
        assert words in refusal_lines(server)[-1], kind
        answer = httpx.post(f"{server.url}/complete", json=_BODY)
        assert answer.status_code == 200 and answer.headers["X-Weights-Version"] == version
        refused.append(kind)
    tried = len(kinds if promise.full else _IN_EVERY_RUN)
    promise.all_of("kinds of bad weights that check, start and reload refuse alike", len(refused), tried)


@pytest.mark.parametrize(("kind", "source"), [("an encoder that explodes", "fox"), ("numbers that explode", None)])
def test_unverified_bad_weights_make_the_service_unready(
    serve: Services, tmp_path: Path, faults: Faults, promise: Promise, kind: str, source: str | None
) -> None:
    """Control of the test above, and the fallback if the startup check misses bad weights."""
    good, link = good_weights(tmp_path / "good", 0), tmp_path / "current"
    link.symlink_to(bad_weights(tmp_path / "bad", good, kind))
    faults.arm("engine.unproven", "skip")
    server = serve(*_TM, weights=link, environment=faults.removing("engine.unproven"))
    assert _ready(server).status_code == 200
    assert _statuses(server, FAILURES - 1, source=source) == {500}
    time.sleep(0.2)
    assert _ready(server).status_code == 200, "fewer failures than the limit must not change readiness"
    assert _statuses(server, 1, source=source) == {500}
    began = time.monotonic()
    assert server.wait_for(lambda: _ready(server).status_code == 503)
    seconds = time.monotonic() - began
    answer = _ready(server)
    assert answer.json()["phase"] == "failing" and "server's side" in answer.json()["reason"]
    assert int(answer.headers["Retry-After"]) >= 1
    point_link(link, good)
    assert has_reloaded(server)
    assert server.wait_for(lambda: _ready(server).status_code == 200)
    assert _statuses(server, 1) == {200}
    promise.at_most("seconds from the eighth failure in a row to 503", seconds, target=1, floor=5,
                    n=FAILURES, unit="s")  # fmt: skip


def test_repeated_poisoned_request_keeps_the_service_ready(
    serve: Services, tmp_path: Path, faults: Faults, promise: Promise
) -> None:
    n, ready = promise.size(40, 1000), 0
    server = serve(weights=good_weights(tmp_path / "good", 0), environment=faults.environment, fake_ms=1)
    # With the comma, because the canary draws a seed, which may begin with 666.
    faults.arm("fake.not_finite", "spoil", match="seed=666,")
    for _ in range(n):
        assert _statuses(server, 1, seed=666) == {500}
        ready += _ready(server).status_code == 200
    time.sleep(RECHECK_SECONDS)
    assert _ready(server).status_code == 200 and "not ready: the last" not in server.log_text()
    promise.all_of("health checks that are 200 beside a poisoned request sent again and again", ready, n)
