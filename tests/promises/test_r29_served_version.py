"""A crash between the copy of new weights and their reload changes nothing: engines restart from the version that is
served, and every stream goes on byte for byte.

New files replace the old ones by each common method, in small steps, and the engine is killed after one of the
steps. Most tests run the fake engine, which starts in half a second.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.armed_faults import Faults
from tests.support.load.concurrent_clients import (
    CompletionExchange,
    RequestSpec,
    children,
    compare_outputs,
    concurrent_requests,
    engine_pid,
    engine_pids,
    is_ready,
    kill_engine,
    outputs,
    send_all,
)
from tests.support.model.bad_weights import good_weights
from tests.support.promise_figures import Promise
from tests.support.reloads import has_reloaded
from tests.support.servers import Server
from tests.support.services import Services
from tests.support.trials import Trials

_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
Copy = Callable[[Path, Path], Iterator[None]]
"""(new files, weights directory) -> iterator that pauses after each step."""


def _specs(max_tokens: int) -> list[RequestSpec]:
    common: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "max_tokens": max_tokens}
    bodies: list[dict[str, Any]] = [{"seed": 1}, {"seed": 2, "n": 2}, {"seed": 3, "stream": False}]
    specs = [RequestSpec(body={**common, "prompt": "Once upon a time", **body}) for body in bodies]
    one = {"prompt": "The moon", "max_tokens": max_tokens, "seed": 4, "stream": True}
    return [*specs, RequestSpec(path="/v1/completions", body=one)]


def _replaced_in_place(new: Path, weights: Path) -> Iterator[None]:
    """cp new/* weights/"""
    for path in sorted(new.iterdir()):
        content = path.read_bytes()
        with (weights / path.name).open("wb", buffering=0) as file:
            yield
            for part in (content[: len(content) // 2], content[len(content) // 2 :]):
                file.write(part)
                yield


def _renamed(new: Path, weights: Path) -> Iterator[None]:
    """rsync -a new/ weights/"""
    for path in sorted(new.iterdir()):
        temporary = weights / f".{path.name}.Xy12"
        temporary.write_bytes(path.read_bytes()[:100])
        yield
        temporary.write_bytes(path.read_bytes())
        yield
        temporary.replace(weights / path.name)
        yield


def _removed_first(new: Path, weights: Path) -> Iterator[None]:
    """rm weights/*; cp new/* weights/"""
    for path in list(weights.iterdir()):
        path.unlink()
        yield
    for path in sorted(new.iterdir()):
        (weights / path.name).write_bytes(path.read_bytes())
        yield


def _directory_moved(new: Path, weights: Path) -> Iterator[None]:
    """mv weights old; cp -r new weights; rm -r old"""
    old = weights.with_name("old")
    weights.rename(old)
    yield
    weights.mkdir()
    yield
    yield from _replaced_in_place(new, weights)
    for path in list(old.iterdir()):
        path.unlink()
        yield
    old.rmdir()


def _link_switched(new: Path, weights: Path) -> Iterator[None]:
    """ln -sfn next weights; rm -r the old target"""
    old = weights.resolve()
    target = weights.with_name(f"next-{os.urandom(4).hex()}")
    shutil.copytree(new, target)
    yield
    link = weights.with_name(".link")
    link.symlink_to(target)
    yield
    if not weights.is_symlink():
        old = weights.rename(weights.with_name("old"))
        yield
    link.replace(weights)
    yield
    for path in list(old.iterdir()):
        path.unlink()
        yield
    old.rmdir()


COPY_METHODS: dict[str, Copy] = {
    "in place": _replaced_in_place,
    "by rename": _renamed,
    "removed first": _removed_first,
    "directory moved": _directory_moved,
    "link switched": _link_switched,
}


@pytest.fixture
def sets(tmp_path: Path) -> list[Path]:
    """Two complete weights directories, with different chat templates, too."""
    sets = [good_weights(tmp_path / name, seed) for seed, name in enumerate(("one", "two"))]
    for index, directory in enumerate(sets):
        (directory / "chat_template.jinja").write_text(_TEMPLATE + "x" * index)
    return sets


@pytest.fixture
def directory(tmp_path: Path, sets: list[Path]) -> Path:
    """The directory that the service serves."""
    return Path(shutil.copytree(sets[0], tmp_path / "weights"))


def _model(server: Server) -> str:
    return str(httpx.get(f"{server.url}/v1/models").json()["data"][0]["weights_version"])


def _reload(server: Server) -> None:
    before = _model(server)
    assert has_reloaded(server), server.log_text()
    assert server.wait_for(lambda: len(engine_pids(server)) == 1)
    assert _model(server) != before


def _kill_during(
    server: Server, copy: Iterator[None], steps: int, specs: list[RequestSpec]
) -> list[CompletionExchange]:
    """Exchanges during which the engine is killed after `steps` steps of a copy."""
    with concurrent_requests(server, specs) as answers:
        assert server.wait_for(lambda: all(answer.n_events > 3 for answer in (answers[0], answers[1], answers[3])))
        for _ in range(steps):
            next(copy, None)
        kill_engine(server)
        assert server.wait_for(lambda: is_ready(server)), "the next engine must start during the copy"
        deque(copy, maxlen=0)
    return answers


def test_streams_survive_an_engine_kill_at_any_step_of_a_copy(
    serve: Services, tmp_path: Path, sets: list[Path], directory: Path, promise: Promise
) -> None:
    """One service for all methods: after each kill it reloads the new files and continues with the next method."""
    specs, server, reloads = _specs(max_tokens=promise.size(100, 200)), serve(weights=directory, fake_ms=5), 0
    for method, copy in COPY_METHODS.items():
        counted = Path(shutil.copytree(sets[0], tmp_path / method / "weights"))
        n_steps = sum(1 for _ in copy(sets[1], counted))
        n = promise.size(2 if method == "in place" else 1, max(20, n_steps))
        rng, trials = random.Random(f"{method}/29"), Trials()
        for attempt in range(n):
            expected = outputs(send_all(server, specs))
            steps = 1 + (attempt % n_steps if promise.full else rng.randrange(n_steps))
            reloads += 1
            found = _kill_during(server, copy(sets[reloads % 2], directory), steps, specs)
            trials += compare_outputs(server, found, expected)
            assert not trials.first_difference, (method, steps, trials.first_difference)
            _reload(server)
        promise.all_of(f"outputs identical, engine killed during a copy: {method}", trials)


@pytest.mark.parametrize("method", ["in place", "removed first"])
def test_service_without_a_snapshot_ends(
    serve: Services, faults: Faults, sets: list[Path], directory: Path, method: str
) -> None:
    """Control: the engine restarts from the changed directory."""
    faults.arm("weights.no_snapshot", "skip")
    server = serve(weights=directory, environment=faults.removing("weights.no_snapshot"), fake_ms=5)
    deque(COPY_METHODS[method](sets[1], directory), maxlen=0)
    os.kill(engine_pid(server), signal.SIGKILL)
    assert server.process.wait(timeout=60) == 1
    assert "holds other weights than the engine that ended had" in server.log.read_text()


def test_completions_grammars_and_chats_keep_the_served_version(
    serve: Services, sets: list[Path], directory: Path, promise: Promise
) -> None:
    """All helper processes are killed after the copy, too, so grammar validators reread the tokenizer."""
    common: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "seed": 1}
    chat = {"messages": [{"role": "user", "content": "The fox"}], "temperature": 0, "max_tokens": 20, "seed": 1}
    specs = [
        RequestSpec(body={**common, "prompt": "The fox", "ignore_eos": True}),
        RequestSpec(body={**common, "prompt": "The fox", "regex": "[a-z ]{20,30}", "stream": False}),
        RequestSpec(path="/v1/chat/completions", body=chat),
    ]
    flags = ("--dtype", "float32", "--threads", "1", "--kv-blocks", "64")
    server, n, trials = serve(*flags, weights=directory), promise.size(1, 20), Trials()
    for attempt in range(n):
        expected, new = outputs(send_all(server, specs)), sets[(attempt + 1) % 2]
        deque(_replaced_in_place(new, directory), maxlen=0)
        (directory / "tokenizer.json").write_text("{}")
        kill_engine(server, *(pid for pid in children(server) if pid != engine_pid(server)))
        assert server.wait_for(lambda: is_ready(server))
        trials += compare_outputs(server, send_all(server, specs), expected)
        shutil.copyfile(new / "tokenizer.json", directory / "tokenizer.json")
        before = _model(server)
        server.process.send_signal(signal.SIGHUP)
        assert server.wait_for(lambda before=before: _model(server) != before), server.log_text()
    promise.all_of("outputs identical to those before the copy, all helper processes killed after it", trials)


@pytest.mark.parametrize("method", ["in place", "directory moved"])
def test_streams_survive_an_engine_kill_during_a_copy_of_weights_that_are_in_the_store(
    serve: Services, tmp_path: Path, sets: list[Path], method: str
) -> None:
    """Large weights are copied to the cache directory, which is removed meanwhile, too."""
    for number, directory in enumerate(sets):
        with (directory / "model.safetensors").open("ab") as file:
            file.write(random.Random(number).randbytes(25 << 20))  # the fake engine reads no tensors
        (directory / "manifest.json").unlink(missing_ok=True)
    directory, cache = Path(shutil.copytree(sets[0], tmp_path / "weights")), tmp_path / "cache"
    flags = ("--kernels", "torch", "--cache-dir", str(cache))  # nothing is compiled into the empty directory
    server = serve(*flags, weights=directory, fake_ms=5)
    assert server.wait_for(lambda: len(list(cache.glob("weights-store/*/version.json"))) == 1), server.log_text()
    specs = _specs(max_tokens=100)
    expected, copy = outputs(send_all(server, specs)), COPY_METHODS[method]
    n_steps = sum(1 for _ in copy(sets[1], Path(shutil.copytree(sets[0], tmp_path / "counted"))))
    shutil.rmtree(cache)
    found = _kill_during(server, copy(sets[1], directory), n_steps - 1, specs)
    trials = compare_outputs(server, found, expected)
    assert not trials.first_difference, trials.first_difference
    _reload(server)
    assert outputs(send_all(server, specs)) != expected
    assert server.wait_for(lambda: len(list(cache.glob("weights-store/*/version.json"))) == 1), server.log_text()
