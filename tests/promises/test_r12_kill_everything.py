"""kill -9 of everything under load: the service starts again at once on its port, leaves no file and no process, and
answers the same text.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.armed_faults import Faults
from tests.support.fake_compiler import FakeCompiler, fake_compiler
from tests.support.load.concurrent_clients import Ask, children, crowd, engine_pid, engine_pids, visit
from tests.support.processes import has_exited
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

_ASKS = [
    Ask(body={"prompt": "Once", "max_tokens": 150, "ignore_eos": True, "seed": seed, "temperature": 1.0})
    for seed in range(16)
]
_LONG = [Ask(body={**ask.body, "max_tokens": 8000}) for ask in _ASKS]
"""40 s, if they are let."""
_GUIDED: dict[str, Any] = {"prompt": "a", "regex": "[ab]{5}", "max_tokens": 8, "stream": False}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _kill_all(server: Server, *, api_first: bool) -> list[int]:
    pids = [server.process.pid, *children(server)]
    for pid in pids if api_first else reversed(pids):
        with suppress(ProcessLookupError):  # a process whose parent was killed first may have exited already
            os.kill(pid, signal.SIGKILL)
    server.process.wait()
    return pids


def test_it_starts_again_after_kill_9_of_everything(
    serve: Services, tmp_path: Path, weights: Path, promise: Promise
) -> None:
    rounds, rng = promise.size(3, 50), random.Random(12)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {"TMPDIR": str(scratch), "XDG_CACHE_HOME": str(scratch / "cache")}
    before = _files(weights)
    flags = ("--port", str(_free_port()))

    def start(wait: bool = True) -> Server:
        return serve(*flags, fake_ms=5, environment=environment, wait=wait)

    server = start()
    expected = [answer.told() for answer in visit(server, _ASKS)]
    good = 0
    for number in range(rounds):
        with crowd(server, _ASKS):
            time.sleep(rng.uniform(0.05, 0.5))
            pids = _kill_all(server, api_first=number % 2 == 0)
        if number % 4 == 3:  # and once while it starts
            server = start(wait=False)
            time.sleep(rng.uniform(0.0, 0.5))
            pids += _kill_all(server, api_first=True)
        server = start()
        same = [answer.told() for answer in visit(server, _ASKS)] == expected
        clean = not any(scratch.iterdir()) and _files(weights) == before
        good += same and clean and server.wait_for(lambda pids=pids: all(map(has_exited, pids)))  # type: ignore[misc]
    promise.all_of("starts after kill -9 of everything under load", good, rounds)


def _files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("point", "deed"),
    [("engine.step", "nothing"), ("engine.step", "hold gil"), ("engine.step", "stop"), ("engine.load", "sleep")],
)
def test_the_engine_dies_with_a_killed_service_whatever_it_does(
    serve: Services, tmp_path: Path, point: str, deed: str
) -> None:
    """It need not look at the pipe for that."""
    faults = Faults(tmp_path / "faults")
    if point == "engine.load":
        faults.arm(point, deed, times=1)
    server = serve(fake_ms=5, environment=faults.environment, wait=point == "engine.step")
    assert server.wait_for(lambda: bool(engine_pids(server)))
    engine = engine_pid(server)
    if point == "engine.step":
        with crowd(server, _LONG) as answers:
            assert server.wait_for(lambda: answers[0].n_events > 2)
            if deed != "nothing":
                faults.arm(point, deed, times=1)
            assert server.wait_for(lambda: not faults.is_armed(point)), "it does not do it"
            server.process.kill()
    else:
        assert server.wait_for(lambda: not faults.is_armed(point)), "it does not do it"
        server.process.kill()
    server.process.wait()
    assert server.wait_for(lambda: has_exited(engine), 3)


def test_the_processes_that_check_guides_die_with_a_killed_service(serve: Services) -> None:
    server = serve(fake_ms=5)
    assert httpx.post(f"{server.url}/complete", json=_GUIDED, timeout=60).status_code == 200
    pids = children(server)
    checker = [pid for pid in pids if b"validator_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(checker[0], signal.SIGSTOP)  # a second one may be starting
    server.process.kill()
    server.process.wait()
    assert server.wait_for(lambda: all(map(has_exited, pids)), 10)


@pytest.fixture
def slow(tmp_path: Path, stub_library: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """A compiler that never ends."""
    fake = fake_compiler(tmp_path, stub_library, before="while true; do sleep 0.1; done")
    monkeypatch.setenv("CXX", str(fake.path))
    return fake


def test_the_engines_own_build_of_kernels_dies_with_a_killed_service(
    serve: Services, tmp_path: Path, slow: FakeCompiler
) -> None:
    cache_dir = tmp_path / "cache"
    server = serve("--kernels", "native", "--cache-dir", str(cache_dir), wait=False)
    _wait_long(server, lambda: bool(slow.pids))
    pids = [*children(server), *slow.pids]
    server.process.kill()
    server.process.wait()
    assert server.wait_for(lambda: all(map(has_exited, pids)), 10)


def _wait_long(server: Server, condition: Callable[[], bool]) -> None:
    assert server.wait_for(condition, 60), server.log.read_text()
