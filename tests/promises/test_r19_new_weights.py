"""New weights are loaded while serving: no request fails, no response mixes old and new, and bad weights are refused.

Bad weights are loaded by the real engine with a tiny model; most reload tests run the fake engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from benchmarks.client import Client
from tests.support.armed_faults import Faults
from tests.support.completion_client import Event, joined_text, parse_events, stream
from tests.support.load import concurrent_clients
from tests.support.load.concurrent_clients import children, is_ready
from tests.support.model.bad_weights import BAD, KV_BLOCKS, bad_weights, good_weights
from tests.support.processes import living, memory, open_files
from tests.support.promise_figures import Promise
from tests.support.reloads import count_reloads, has_reloaded, point_link, refusal_lines
from tests.support.servers import Server, start_server, stop_server
from tests.support.services import Services
from tests.support.trials import Trials

_FOX = {"prompt": "The fox", "max_tokens": 60, "temperature": 0, "seed": 3, "ignore_eos": True}
_IN_EVERY_RUN = (
    "a missing file", "numbers that are not finite", "log-probabilities of another model", "half a set of files",
    "a tokenizer larger than the model", "a model that does not fit",
)  # fmt: skip
"""One kind per way of detection; all kinds at full size. R28 always tests that `check` refuses all."""
_TM = ("--dtype", "float32", "--threads", "1", "--kv-blocks", str(KV_BLOCKS))


class _Answer(NamedTuple):
    """The result of one request."""

    version: str
    """First 16 digits of the weights' SHA-256 in the response."""
    prompt: str
    text: str


class _SteadyLoad:
    """Constant load during a `with` block; read `load.answers` and `load.failures` after it.

    Each client sends requests in sequence to one of three endpoints, and pauses `pause` seconds between them, to leave
    CPU for engines that are loading. Another thread polls /health/ready.
    """

    def __init__(self, server: Server, *, clients: int, max_tokens: int, pause: float = 0.0) -> None:
        self._server, self._clients, self._pause = server, clients, pause
        self._body = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "seed": 1}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=asyncio.run, args=[self._work()])]
        self._threads.append(threading.Thread(target=self._watch_health))
        self.answers: list[_Answer] = []
        self.failures: list[str] = []
        self.health_checks = 0

    def __enter__(self) -> _SteadyLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=60)

    async def _work(self) -> None:
        await asyncio.gather(*map(self._client, range(self._clients)))

    async def _client(self, index: int) -> None:
        path, is_streamed = (("/complete", True), ("/complete", False), ("/v1/completions", False))[index % 3]
        prompt = ("Once upon a time", "The moon", "fox", "who sang to")[index % 4]
        body = json.dumps({**self._body, "prompt": prompt, "stream": is_streamed}).encode()
        address = self._server.service.address
        while not self._stop.is_set():
            answer, client = concurrent_clients.CompletionExchange(address.request("POST", path, body)), Client(address)
            await client.run(answer)  # on its own connection: the client does not retry
            client.close()
            try:
                self.answers.append(_read(answer, prompt))
            except Exception as error:
                self.failures.append(f"{answer.status} {answer.error or error!r}: {answer.body[-300:]!r}")
            await asyncio.sleep(self._pause)

    def _watch_health(self) -> None:
        while not self._stop.wait(0.05):
            self.health_checks += 1
            if not is_ready(self._server):
                self.failures.append("/health/ready is not 200")


def _read(answer: concurrent_clients.CompletionExchange, prompt: str) -> _Answer:
    """Parse a response; all its weights versions must agree."""
    assert answer.status == 200
    output = answer.output()
    if "texts" in output:
        assert answer.is_complete
    text = output["texts"][0] if "texts" in output else output["choices"][0]["text"]
    (version,) = {name[:16] for name in re.findall(rb'"(?:weights_version|system_fingerprint)": ?"(\w+)', answer.body)}
    return _Answer(version.decode(), prompt, text)


def _mixed(answers: Sequence[_Answer]) -> list[_Answer]:
    """Inconsistent responses: each prompt has exactly one output per version, and versions differ in their outputs."""
    texts: dict[tuple[str, str], set[str]] = defaultdict(set)
    versions: dict[tuple[str, str], set[str]] = defaultdict(set)
    for answer in answers:
        texts[answer.version, answer.prompt].add(answer.text)
        versions[answer.prompt, answer.text].add(answer.version)
    return [a for a in answers if len(texts[a.version, a.prompt]) > 1 or len(versions[a.prompt, a.text]) > 1]


@pytest.fixture
def weights_dirs(tmp_path: Path) -> list[Path]:
    """Two weights directories."""
    return [good_weights(tmp_path / name, seed) for seed, name in enumerate(("one", "two"))]


@pytest.fixture
def link(tmp_path: Path, weights_dirs: list[Path]) -> Path:
    """The weights link that services are started with; it points to the first directory."""
    link = tmp_path / "current"
    link.symlink_to(weights_dirs[0])
    return link


def _reload(server: Server, link: Path, target: Path, outcome: str) -> bool:
    """Request a reload of other weights; return whether it had this outcome."""
    point_link(link, target)
    return has_reloaded(server, outcome)


def _has_one_engine(server: Server, seconds: float = 60.0) -> bool:
    return server.wait_for(lambda: len(children(server)) == 1, seconds)


def _stop_and_check(server: Server) -> None:
    engines = children(server)
    assert stop_server(server) == 0, server.log.read_text()
    assert not living(engines), "an engine outlived its service"


def test_reload_refuses_bad_weights_of_every_kind_without_failed_requests(
    serve: Services, tmp_path: Path, link: Path, weights_dirs: list[Path], promise: Promise
) -> None:
    good, kinds = weights_dirs[0], list(BAD if promise.full else _IN_EVERY_RUN)
    server = serve(*_TM, weights=link)
    first, pause, refusals = children(server), 0.0 if promise.full else 0.1, []
    with _SteadyLoad(server, clients=promise.size(3, 6), max_tokens=24, pause=pause) as load:
        for index, kind in enumerate(kinds):
            bad = bad_weights(tmp_path / f"bad-{index}", good, kind)
            refused = _reload(server, link, bad, "refused")
            server.wait_for(lambda index=index: len(refusal_lines(server)) > index)  # type: ignore[misc]
            refusals.append(
                refused and len(refusal_lines(server)) == index + 1 and BAD[kind][1] in refusal_lines(server)[-1]
            )
            assert refusals[-1], (kind, server.log.read_text()[-2000:])
            point_link(link, good)
        time.sleep(0.5)
    assert server.wait_for(lambda: children(server) == first), "the first engine was replaced, or another one is left"
    promise.all_of("bad weights of every kind refused, with the reason in one line", sum(refusals), len(kinds))
    good_answers = len(load.answers) - len(_mixed(load.answers))
    promise.all_of("responses while bad weights are refused", good_answers, len(load.answers) + len(load.failures))
    assert load.health_checks > 20 and {answer.version for answer in load.answers} == {load.answers[0].version}


def test_killing_a_loading_engine_fails_no_request(
    serve: Services, link: Path, weights_dirs: list[Path], faults: Faults, promise: Promise
) -> None:
    server = serve(weights=link, environment=faults.environment, fake_ms=1)
    (first,) = children(server)
    with _SteadyLoad(server, clients=2, max_tokens=24, pause=0.1) as load:
        before = count_reloads(server, "refused")
        faults.arm("fake.load", "sleep", seconds=60)
        point_link(link, weights_dirs[1])
        server.process.send_signal(signal.SIGHUP)
        assert server.wait_for(lambda: len(children(server)) == 2)
        os.kill(next(pid for pid in children(server) if pid != first), signal.SIGKILL)
        assert server.wait_for(lambda: count_reloads(server, "refused") > before)
        assert server.wait_for(lambda: refusal_lines(server))
        assert "their engine ended while it was loading" in refusal_lines(server)[0]
        time.sleep(0.3)
    assert server.wait_for(lambda: children(server) == [first])
    assert not _mixed(load.answers) and len({answer.version for answer in load.answers}) == 1
    promise.all_of(
        "responses while a loading engine is killed", len(load.answers), len(load.answers) + len(load.failures)
    )
    faults.disarm("fake.load")
    # Then good weights load, and the service can stop during another load.
    assert _reload(server, link, weights_dirs[1], "switched")
    faults.arm("fake.load", "sleep", seconds=60)
    server.process.send_signal(signal.SIGHUP)
    assert server.wait_for(lambda: len(children(server)) > 1)
    _stop_and_check(server)


def test_reload_under_load_fails_no_request(
    serve: Services, link: Path, weights_dirs: list[Path], promise: Promise
) -> None:
    switches, sizes = promise.size(6, 30), []
    server = serve(weights=link, fake_ms=5)
    pid = server.process.pid
    with _SteadyLoad(server, clients=promise.size(6, 32), max_tokens=30) as load:
        for index in range(switches):
            assert _reload(server, link, weights_dirs[(index + 1) % 2], "switched"), server.log.read_text()[-2000:]
            assert _has_one_engine(server), "the old engine is still running"
            sizes.append((memory(pid) / 2**20, open_files(pid)))
            time.sleep(0.3)
        # Pipes of an engine that has just ended, and connections, close after a moment.
        assert server.wait_for(lambda: open_files(pid) <= sizes[1][1] + 4), f"files stay open: {sizes}"
    _stop_and_check(server)
    assert len({answer.version for answer in load.answers}) == 2
    total = len(load.answers) + len(load.failures)
    assert not load.failures, load.failures[:5]
    good = total - len(_mixed(load.answers))
    promise.all_of("responses across reloads that are complete and of one version", good, total)
    promise.at_most(
        "memory growth per reload after the first", (sizes[-1][0] - sizes[1][0]) / (switches - 2),
        target=0.5, floor=2.0, unit="MiB each", n=switches,
    )  # fmt: skip


def test_mixed_responses_are_detected() -> None:
    """Control: half of one version's output followed by half of the other's."""
    fine = [_Answer("a", "p", "xxxx"), _Answer("b", "p", "yyyy"), _Answer("a", "q", "zzzz")]
    assert not _mixed([*fine, *fine])
    assert _mixed([*fine, _Answer("a", "p", "xxyy")])
    assert _mixed([*fine, _Answer("b", "p", "xxxx")])


def _slow(faults: Faults) -> AbstractContextManager[None]:
    """Steps of half a second, so that a started stream still runs during a reload."""
    return faults.armed("engine.forward", "sleep", seconds=0.5, after=5)


def _stream_across_reload(server: Server, link: Path, to: Path, faults: Faults, *, is_cut: bool) -> list[Event]:
    """Events of a stream across a reload; with `is_cut` it is disconnected before and resumed after."""
    with _slow(faults), httpx.stream("POST", f"{server.url}/complete", json=_FOX, timeout=60) as response:
        name, lines = response.headers["X-Request-Id"], response.iter_lines()
        while next(lines) != "event: token":
            pass
        if is_cut:
            response.close()
        assert _reload(server, link, to, "switched")
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == to.name
        faults.disarm("engine.forward")
        if not is_cut:
            list(lines)
    return parse_events(httpx.get(f"{server.url}/complete/{name}/events", timeout=60).text)


def test_streams_and_resumed_streams_keep_their_weights(
    serve: Services, link: Path, weights_dirs: list[Path], faults: Faults, promise: Promise
) -> None:
    server = serve(weights=link, environment=faults.environment, fake_ms=10)
    trials, n, texts = Trials(), promise.size(4, 20), [_undisturbed(server)]
    for index in range(n):
        events = _stream_across_reload(server, link, weights_dirs[(index + 1) % 2], faults, is_cut=index % 4 > 1)
        texts += [_undisturbed(server)] if index == 0 else []
        got = (joined_text(events), events[-1].name)
        trials.compare((texts[index % 2], "done"), got, request_id=events[0].id.partition(":")[0], log=server.log)
        assert _has_one_engine(server)
    assert texts[0] != texts[1]
    promise.all_of("streams identical through a reload", trials)


def test_leftover_engines_and_streams_that_switch_weights_are_detected(
    serve: Services, link: Path, weights_dirs: list[Path], faults: Faults
) -> None:
    """Positive controls: planted faults that the checks of the tests above must detect."""
    environment = faults.removing("job.other_engine", "reload.keep_old")
    server = serve(weights=link, environment=environment, fake_ms=10)
    undisturbed = _undisturbed(server)
    faults.arm("job.other_engine", "mix")
    assert joined_text(_stream_across_reload(server, link, weights_dirs[1], faults, is_cut=True)) != undisturbed
    faults.disarm("job.other_engine")
    assert _has_one_engine(server)
    faults.arm("reload.keep_old", "keep")
    assert _reload(server, link, weights_dirs[0], "switched")
    assert not _has_one_engine(server, 1.5)
    _stop_and_check(server)


def _undisturbed(server: Server) -> str:
    return joined_text(stream(server.url, **_FOX))


def test_sighup_reloads_and_a_closed_terminal_ends_the_service(tmp_path: Path, weights: Path) -> None:
    controlling, controlled = pty.openpty()
    server = start_server(tmp_path, weights, fake_ms=5, terminal=controlled)
    os.close(controlled)
    server.process.send_signal(signal.SIGHUP)
    assert server.wait_for(lambda: count_reloads(server, "switched") == 1)
    engines = children(server)
    os.close(controlling)  # the kernel sends SIGHUP
    assert server.process.wait(timeout=60) == 0
    assert not living(engines)
