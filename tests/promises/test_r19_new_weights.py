"""New weights are taken over while serving: no request fails, no answer mixes old and new, and bad ones are refused.

Bad weights are loaded by the real engine, around a tiny model; switches are tried with the fake one, many at a time.
"""

from __future__ import annotations

import os
import pty
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest

from app.cli import check
from tests.support.armed_faults import Faults
from tests.support.completion_client import Event, parse_events, stream, text_of
from tests.support.load.steady_load import Answer, SteadyLoad, mixed
from tests.support.model.bad_weights import BAD, KV_BLOCKS, bad_weights, good_weights
from tests.support.processes import children, memory, open_files
from tests.support.promise_figures import Promise
from tests.support.reloads import has_reloaded, point, refusals, reloads
from tests.support.servers import Server, start_server, stop_server

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
_FOX = {"prompt": "The fox", "max_tokens": 60, "temperature": 0, "seed": 3, "ignore_eos": True}
_IN_EVERY_RUN = (
    "a missing file", "numbers that are not finite", "log-probabilities of another model", "half a set of files",
    "a tokenizer larger than the model", "a model that does not fit", "numbers that explode",
)  # fmt: skip
"""One kind of each way in which a service finds it; all kinds at full size, the others by `check` here."""
_TM = ("--dtype", "float32", "--threads", "1", "--kv-blocks", str(KV_BLOCKS))


def _engines(server: Server) -> list[int]:
    return children(server.process.pid)


@pytest.fixture
def ways(tmp_path: Path) -> list[Path]:
    """Two weights directories."""
    return [good_weights(tmp_path / name, seed) for seed, name in enumerate(("one", "two"))]


def _reload(server: Server, link: Path, target: Path, outcome: str) -> bool:
    """Asks for other weights; whether it came to this outcome."""
    point(link, target)
    return has_reloaded(server, outcome)


@contextmanager
def _service(
    folder: Path, first: Path, *flags: str, fake_ms: float | None = None, faults: Faults | None = None
) -> Iterator[tuple[Server, Path]]:
    """A service of what a link leads to, and the link."""
    link = folder / "current"
    link.symlink_to(first)
    environment = {**_ONE_THREAD, **(faults.removing("job.other_engine", "reload.keep_old") if faults else {})}
    server = start_server(folder, link, *flags, environment=environment, fake_ms=fake_ms)
    try:
        yield server, link
    finally:
        engines = _engines(server) if server.process.poll() is None else []
        code = stop_server(server)
    assert code == 0, server.log.read_text()
    assert not [pid for pid in engines if Path(f"/proc/{pid}").exists()], "an engine outlived its service"


def test_bad_weights_of_every_kind_are_refused_without_a_failed_request(tmp_path: Path, promise: Promise) -> None:
    good = good_weights(tmp_path / "good", 0)
    kinds = list(BAD if promise.full else _IN_EVERY_RUN)
    said = []
    with _service(tmp_path, good, *_TM) as (server, link):
        first = _engines(server)
        pause = 0.0 if promise.full else 0.1
        with SteadyLoad(server.url, clients=promise.size(3, 6), max_tokens=24, pause=pause) as load:
            for index, kind in enumerate(kinds):
                words = BAD[kind][1]
                bad = bad_weights(tmp_path / f"bad-{index}", good, kind)
                refused = _reload(server, link, bad, "refused")
                server.wait_for(lambda index=index: len(refusals(server)) > index)
                said.append(refused and len(refusals(server)) == index + 1 and words in refusals(server)[-1])
                assert said[-1], (kind, server.log.read_text()[-2000:])
                point(link, good)
            time.sleep(0.5)
        assert server.wait_for(lambda: _engines(server) == first), "the first engine was ended, or another one stayed"
        assert "Traceback" not in server.log.read_text()
    promise.all_of("bad weights of every kind refused, with the reason in one line", sum(said), len(kinds))
    good_answers = len(load.answers) - len(mixed(load.answers))
    promise.all_of("answers while bad weights are refused", good_answers, len(load.answers) + len(load.failures))
    assert load.health_checks > 20 and {answer.version for answer in load.answers} == {load.answers[0].version}


@pytest.mark.parametrize("kind", [kind for kind in BAD if kind not in _IN_EVERY_RUN])
def test_the_reason_is_found_without_a_service_too(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = bad_weights(tmp_path / "bad", good_weights(tmp_path / "good", 0), kind)
    assert check.main([str(bad)]) == 2
    said = capsys.readouterr().err
    assert BAD[kind][1] in said and said.count("\n") == 1


def test_an_engine_that_is_killed_while_it_loads_is_not_missed(
    tmp_path: Path, ways: list[Path], faults: Faults, promise: Promise
) -> None:
    good, other = ways
    with _service(tmp_path, good, fake_ms=1, faults=faults) as (server, link):
        first = _engines(server)
        with SteadyLoad(server.url, clients=2, max_tokens=24, pause=0.1) as load:
            before = reloads(server, "refused")
            faults.arm("fake.load", "sleep", seconds=60)
            point(link, other)
            server.process.send_signal(signal.SIGHUP)
            assert server.wait_for(lambda: len(_engines(server)) == 2)
            os.kill(next(pid for pid in _engines(server) if pid not in first), signal.SIGKILL)
            assert server.wait_for(lambda: reloads(server, "refused") > before)
            assert server.wait_for(lambda: refusals(server))
            assert "their engine ended while it was loading" in refusals(server)[0]
            time.sleep(0.3)
        assert server.wait_for(lambda: _engines(server) == first)
        assert not mixed(load.answers) and len({answer.version for answer in load.answers}) == 1
        faults.disarm("fake.load")
        # Good weights after all this, and the service ends while others are loading: _service looks for orphans.
        assert _reload(server, link, other, "switched")
        faults.arm("fake.load", "sleep", seconds=60)
        server.process.send_signal(signal.SIGHUP)
        assert server.wait_for(lambda: len(_engines(server)) > 1)
    promise.all_of(
        "answers while a loading engine is killed", len(load.answers), len(load.answers) + len(load.failures)
    )


def test_good_weights_are_switched_under_load(tmp_path: Path, ways: list[Path], promise: Promise) -> None:
    switches = promise.size(6, 30)
    sizes = []
    with _service(tmp_path, ways[0], fake_ms=5) as (server, link):
        with SteadyLoad(server.url, clients=promise.size(6, 32), max_tokens=30) as load:
            for index in range(switches):
                assert _reload(server, link, ways[(index + 1) % 2], "switched"), server.log.read_text()[-2000:]
                assert server.wait_for(lambda: len(_engines(server)) == 1), "the old engine stays"
                sizes.append((memory(server.process.pid) / 2**20, open_files(server.process.pid)))
                time.sleep(0.3)
            # The pipes of an engine that has just ended are closed in a moment, and so are connections.
            pid = server.process.pid
            assert server.wait_for(lambda: open_files(pid) <= sizes[1][1] + 4), f"files stay open: {sizes}"
        spoilt = mixed(load.answers)
    assert len({answer.version for answer in load.answers}) == 2
    total = len(load.answers) + len(load.failures)
    assert not load.failures, load.failures[:5]
    promise.all_of("answers across switches that are whole and of one version", total - len(spoilt), total)
    promise.at_most(
        "growth of the service by switches after the first", (sizes[-1][0] - sizes[1][0]) / (switches - 2),
        target=0.5, floor=2.0, unit="MiB each", n=switches,
    )  # fmt: skip


def test_mixed_answers_would_be_found() -> None:
    """The check's own control: half of one version's text behind half of the other's."""
    fine = [Answer("a", "p", "xxxx"), Answer("b", "p", "yyyy"), Answer("a", "q", "zzzz")]
    assert not mixed([*fine, *fine])
    assert mixed([*fine, Answer("a", "p", "xxyy")])
    assert mixed([*fine, Answer("b", "p", "xxxx")])


def _slow(faults: Faults) -> AbstractContextManager[None]:
    """Steps of half a second: a stream that has started is still there when other weights are loaded."""
    return faults.armed("engine.forward", "sleep", seconds=0.5, after=5)


def _across_a_switch(server: Server, link: Path, to: Path, faults: Faults, *, is_cut: bool) -> list[Event]:
    """The events of a stream that a switch meets half-way; a cut one is resumed after it."""
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


def test_a_stream_ends_with_the_weights_it_began_with_also_when_it_is_resumed(
    tmp_path: Path, ways: list[Path], faults: Faults, promise: Promise
) -> None:
    with _service(tmp_path, ways[0], fake_ms=10, faults=faults) as (server, link):
        good, n, texts = 0, promise.size(4, 20), [_undisturbed(server)]
        for index in range(n):
            events = _across_a_switch(server, link, ways[(index + 1) % 2], faults, is_cut=index % 4 > 1)
            texts += [_undisturbed(server)] if index == 0 else []
            good += text_of(events) == texts[index % 2] and events[-1].name == "done"
            assert server.wait_for(lambda: len(_engines(server)) == 1)
        assert texts[0] != texts[1]
        promise.all_of("streams that a switch met half-way, as without it", good, n)


def test_old_engines_that_stay_and_streams_that_go_on_with_the_new_one_would_be_found(
    tmp_path: Path, ways: list[Path], faults: Faults
) -> None:
    """The controls of the tests around: faults in the service, which their checks must see."""
    with _service(tmp_path, ways[0], fake_ms=10, faults=faults) as (server, link):
        undisturbed = _undisturbed(server)
        faults.arm("job.other_engine", "mix")
        assert text_of(_across_a_switch(server, link, ways[1], faults, is_cut=True)) != undisturbed
        faults.disarm("job.other_engine")
        assert server.wait_for(lambda: len(_engines(server)) == 1)
        faults.arm("reload.keep_old", "keep")
        assert _reload(server, link, ways[0], "switched")
        assert not server.wait_for(lambda: len(_engines(server)) == 1, 1.5)


def _undisturbed(server: Server) -> str:
    return text_of(stream(server.url, **_FOX))


def test_a_hang_up_asks_for_new_weights_and_a_terminal_that_closes_ends_the_service(
    tmp_path: Path, weights: Path
) -> None:
    ours, theirs = pty.openpty()
    server = start_server(tmp_path, weights, environment=_ONE_THREAD, fake_ms=5, terminal=theirs)
    os.close(theirs)
    server.process.send_signal(signal.SIGHUP)
    assert server.wait_for(lambda: reloads(server, "switched") == 1)
    engines = _engines(server)
    os.close(ours)  # the kernel sends SIGHUP
    assert server.process.wait(timeout=60) == 0
    assert not [pid for pid in engines if Path(f"/proc/{pid}").exists()]
