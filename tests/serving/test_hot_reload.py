"""Hot reload with scripted engines: which instance serves, which one is closed, and the log."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from app.access.tenant import ANONYMOUS
from app.api.delivery import Connection
from app.api.native.resumable_stream import ResumableStream
from app.api.resume_store import ResumeStore
from app.api.schemas import Receipt
from app.common.errors import EngineError, NotReady, Starting
from app.common.model_version import Version
from app.common.settings import Settings
from app.engine_client.supervisor import EngineStopped
from app.http.errors import ApiError
from app.serving.hot_reload import HotReload
from app.serving.model_instance import ModelInstance
from app.serving.service import Service
from app.serving.weights_snapshot import take_fingerprint, without_links
from app.tokenization.tokenizer_pool import TokenizerPool
from model.checkpoint.manifest import MANIFEST_FILE, manifest_file
from model.files import write_files
from tests.support.async_test import async_test
from tests.support.completion_client import fetch_completion, stream_chunks
from tests.support.servers import Server


class FakeEngine:
    """An engine that loads when the test calls finish()."""

    def __init__(self) -> None:
        self.ready: Any = None
        self.phase = "starting"
        self.restarts = 0
        self.is_running = False
        self.failed_with: EngineError | None = None
        self._ready = asyncio.Event()
        self._stopped: asyncio.Future[EngineStopped] = asyncio.get_running_loop().create_future()

    def start(self, _files: object) -> None:
        self.is_running = True

    async def stop(self) -> None:
        self.is_running = False

    def fail_all(self, error: EngineError) -> None:
        self.failed_with = error

    async def wait_ready(self) -> Any:
        await self._ready.wait()
        return self._facts

    async def wait_stopped(self) -> EngineStopped:
        return await asyncio.shield(self._stopped)

    def finish(self, vocab_size: int = 320) -> None:
        self._facts = SimpleNamespace(vocab_size=vocab_size, model_version=Version("v" * 64))
        self.ready, self.phase = self._facts, "ready"
        self._ready.set()

    def end(self) -> None:
        """Simulates a crash that is not counted yet."""
        self.ready, self.phase = None, "restarting"

    def give_up(self, message: str) -> None:
        self._stopped.set_result(EngineStopped(message, 2))


class ReloadHarness:
    """A service and its reloader with scripted engines."""

    def __init__(self, weights: Path, *, watch: float = 0.0, drain: float = 60.0) -> None:
        self.weights = weights
        self.engines: list[FakeEngine] = []
        self.outcomes: list[str] = []
        first = self._make()
        settings = Settings(weights=weights, watch=watch, request_timeout=drain, resume_seconds=0)
        self.service = Service(settings, first, TokenizerPool())
        self.reloader = HotReload(self.service, self._make_later, self.outcomes.append)

    def _make(self) -> ModelInstance:
        self.engines.append(FakeEngine())
        return ModelInstance(
            without_links(self.weights),
            take_fingerprint(self.weights),
            self.engines[-1],
            None,
            grammar_seconds=1.0,  # type: ignore[arg-type]
        )

    async def _make_later(self) -> ModelInstance:
        return self._make()

    @property
    def running(self) -> list[int]:
        return [index for index, engine in enumerate(self.engines) if engine.is_running]


@asynccontextmanager
async def _serving(harness: ReloadHarness) -> AsyncIterator[ReloadHarness]:
    """Runs the service with its first weights; at the end, asserts that no engine runs."""
    harness.service.instance.start()
    tasks = [asyncio.create_task(harness.service.load()), asyncio.create_task(harness.reloader.run())]
    harness.engines[0].finish()
    await harness.service.wait_loaded()
    try:
        yield harness
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await harness.service.close()
        assert not harness.running


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition was false for a minute")


async def _new_engine(harness: ReloadHarness) -> FakeEngine:
    """Requests a reload; returns the engine that loads the new weights."""
    count = len(harness.engines)
    harness.reloader.request_reload()
    await _until(lambda: len(harness.engines) > count and harness.engines[-1].is_running)
    return harness.engines[-1]


@pytest.fixture
def directory(tmp_path: Path, weights: Path) -> Path:
    """The tiny weights, which a test may change."""
    return Path(shutil.copytree(weights, tmp_path / "mine"))


@async_test
async def test_service_is_starting_only_until_the_first_model_is_loaded(directory: Path) -> None:
    harness = ReloadHarness(directory)
    with pytest.raises(Starting):
        harness.service.require_ready()
    async with _serving(harness):
        harness.service.require_ready()
        harness.engines[0].ready = None  # as after a crash
        with pytest.raises(NotReady) as refused:
            harness.service.require_ready()
        assert not isinstance(refused.value, Starting)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda engine: engine.give_up("config.json: asks for the moon"), "config.json: asks for the moon"),
        (lambda engine: setattr(engine, "restarts", 1), "their engine ended while it was loading (starting)"),
        (lambda engine: (engine.finish(), engine.end()), "their engine ended while it was loading (restarting)"),
        (lambda engine: engine.finish(vocab_size=319), "tokenizer.json: has 320 tokens, the model only 319"),
    ],
)
@async_test
async def test_any_fault_of_new_weights_keeps_the_old_ones(
    directory: Path, fault: Callable[[FakeEngine], None], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with _serving(ReloadHarness(directory)) as harness:
        old = harness.service.instance
        fault(await _new_engine(harness))
        await _until(lambda: harness.running == [0])
        assert harness.service.instance is old and harness.outcomes == ["refused"]
        (await _new_engine(harness)).finish()
        await _until(lambda: harness.running == [2])
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(lines) == 1 and words in lines[0] and "the old ones stay" in lines[0]


@async_test
async def test_unexpected_error_refuses_only_one_load(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> ModelInstance:
        raise RuntimeError("unlike any error of a weights check")

    async with _serving(ReloadHarness(directory)) as harness:
        harness._make, make = broken, harness._make  # type: ignore[method-assign]
        harness.reloader.request_reload()
        await _until(lambda: harness.outcomes == ["refused"])
        harness._make = make  # type: ignore[method-assign]
        (await _new_engine(harness)).finish()
        await _until(lambda: harness.running == [1])
    assert "the old ones stay: RuntimeError in the service" in caplog.text


@async_test
async def test_files_changed_during_the_load_are_refused(directory: Path) -> None:
    async with _serving(ReloadHarness(directory)) as harness:
        engine = await _new_engine(harness)
        (directory / "generation_config.json").write_text('{"temperature": 0.5}')
        engine.finish()
        await _until(lambda: harness.outcomes == ["refused"])
        assert harness.running == [0]


@async_test
async def test_reload_requests_during_a_load_cause_one_more_load(directory: Path) -> None:
    async with _serving(ReloadHarness(directory)) as harness:
        engine = await _new_engine(harness)
        for _ in range(5):
            harness.reloader.request_reload()
        engine.finish()
        await _until(lambda: len(harness.engines) == 3)
        harness.engines[2].finish()
        await _until(lambda: harness.running == [2])
        await asyncio.sleep(0.2)
        assert len(harness.engines) == 3


@async_test
async def test_there_are_never_more_than_two_engines(directory: Path) -> None:
    async with _serving(ReloadHarness(directory)) as harness:
        old = harness.service.instance
        old.acquire()
        (await _new_engine(harness)).finish()
        await _until(lambda: harness.service.instance is not old)
        harness.reloader.request_reload()
        await asyncio.sleep(0.2)
        assert harness.running == [0, 1]
        old.release()
        await _until(lambda: harness.running == [1, 2])


@async_test
async def test_endless_response_does_not_keep_old_weights_forever(directory: Path) -> None:
    async with _serving(ReloadHarness(directory, drain=0.1)) as harness:
        old = harness.service.instance
        old.acquire()
        (await _new_engine(harness)).finish()
        await _until(lambda: harness.running == [1])
        error = harness.engines[0].failed_with
        assert isinstance(error, NotReady) and "no longer served" in str(error)


@async_test
async def test_service_stopped_during_a_load_leaves_no_engine(directory: Path) -> None:
    async with _serving(ReloadHarness(directory)) as harness:
        await _new_engine(harness)
        assert harness.running == [0, 1]
        # _serving asserts that no engine runs


@async_test
async def test_draining_service_aborts_a_load(directory: Path) -> None:
    async with _serving(ReloadHarness(directory)) as harness:
        await _new_engine(harness)
        harness.service.draining = True
        await _until(lambda: harness.running == [0])


@pytest.mark.parametrize("watch", [0.0, 0.05])
@async_test
async def test_first_weights_changed_during_the_load_are_reloaded_or_logged(
    directory: Path, watch: float, caplog: pytest.LogCaptureFixture
) -> None:
    harness = ReloadHarness(directory, watch=watch)
    (directory / "generation_config.json").write_text("{}")
    async with _serving(harness):
        await _until(lambda: len(harness.engines) == (2 if watch else 1))
        await asyncio.sleep(0.2)
    assert ("changed while they were loaded" in caplog.text) == (not watch)


@async_test
async def test_reload_request_waits_for_the_first_weights(directory: Path) -> None:
    harness = ReloadHarness(directory)
    run = asyncio.create_task(harness.reloader.run())
    harness.reloader.request_reload()
    await asyncio.sleep(0.1)
    assert len(harness.engines) == 1
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


@async_test
async def test_watched_directory_is_loaded_when_complete_and_unchanged(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "inkstream")
    files = {path.name: path.read_bytes() for path in directory.iterdir()}  # noqa: ASYNC240
    write_files(directory, {MANIFEST_FILE: manifest_file(files)})
    async with _serving(ReloadHarness(directory, watch=0.05)) as harness:
        changed = {**files, "generation_config.json": b"{}"}
        (directory / "generation_config.json").write_bytes(b"{}")
        await asyncio.sleep(0.5)
        assert len(harness.engines) == 1, "an incomplete set of files was loaded"
        assert caplog.text.count("not complete yet") == 1, "the incomplete set must be neither read nor logged again"
        write_files(directory, {MANIFEST_FILE: manifest_file(changed)})
        await _until(lambda: len(harness.engines) == 2)
        harness.engines[1].give_up("they are bad")
        await _until(lambda: harness.outcomes == ["refused"])
        await asyncio.sleep(0.5)
        assert len(harness.engines) == 2, "refused weights must not be tried again"


@async_test
async def test_changed_link_triggers_a_reload_and_old_weights_keep_their_path(directory: Path) -> None:
    other = Path(shutil.copytree(directory, directory.with_name("other")))
    link = directory.with_name("current")
    link.symlink_to(directory.name)
    async with _serving(ReloadHarness(link, watch=0.05)) as harness:
        old = harness.service.instance
        assert (old.weights, old.model_name) == (directory, "mine")
        new = link.with_name("next")
        new.symlink_to(other.name)
        new.replace(link)
        await _until(lambda: len(harness.engines) == 2)
        harness.engines[1].finish()
        await _until(lambda: harness.outcomes == ["switched"])
        assert (harness.service.instance.weights, harness.service.model_name) == (other, "other")
        assert old.weights == directory
        assert harness.service.is_model_name("mine") and harness.service.is_model_name("other")
        assert not harness.service.is_model_name("current")


def test_fingerprint_detects_replaced_files_and_ignores_unrelated_ones(directory: Path) -> None:
    before = take_fingerprint(directory)
    (directory / ".model.safetensors.1.tmp").write_bytes(b"half")
    (directory / "README.md").write_text("a card")
    assert take_fingerprint(directory) == before
    config = (directory / "config.json").read_bytes()
    write_files(directory, {"config.json": config})
    assert take_fingerprint(directory) != before
    assert take_fingerprint(directory / "nothing").files == ()


def test_every_response_names_its_weights(server: Server) -> None:
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    version = model["weights_version"]
    fox: dict[str, Any] = {"prompt": "fox", "max_tokens": 2}
    requests: list[tuple[str, str, dict[str, Any] | None]] = [
        *(("POST", "/complete", {**fox, "stream": streamed}) for streamed in (True, False)),
        *(("POST", "/v1/completions", {**fox, "stream": streamed}) for streamed in (True, False)),
        *(("POST", path, {"prompt": "fox"}) for path in ("/score", "/tokenize")),
        ("POST", "/detokenize", {"tokens": [70]}),
        ("GET", "/tokenizer_info", None),
    ]
    for method, path, body in requests:
        response = httpx.request(method, f"{server.url}{path}", json=body, timeout=60)
        assert (response.status_code, response.headers["X-Weights-Version"]) == (200, version), path
    receipt = fetch_completion(server.url, prompt="fox", max_tokens=1)["receipt"]
    assert receipt["weights_version"] == version and receipt["numerics"].endswith("-float32")
    assert "weights_revision" not in {**model, **receipt}, "only a model of the Hub has a commit"
    for chunk in stream_chunks(server.url, prompt="fox", max_tokens=2):
        assert chunk["system_fingerprint"] == f"{version[:16]}-{receipt['numerics']}"


@async_test
async def test_disconnected_stream_with_closed_weights_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Receipt, "of", lambda _admitted: None)
    instance = SimpleNamespace(is_closed=False)
    went_on: list[bool] = []
    handle: Any = SimpleNamespace(
        name="req-1",
        callers_id="",
        headers={},
        admitted=SimpleNamespace(instance=instance),
        completion=SimpleNamespace(is_open=True, read=lambda _: None),
        service=SimpleNamespace(require_open=lambda: None),
        detach=lambda: None,
        attach=lambda: went_on.append(True),
        end=lambda: None,
    )
    resume_store = ResumeStore(60.0)
    stream = ResumableStream(handle, resume_store, owner="", extra={}, replay_bytes=1000)
    first, second = Connection(), Connection()
    stream.attach(first)
    stream.detach(first)
    stream.admit_reconnection(ANONYMOUS)
    stream.attach(second)
    stream.detach(second)
    assert went_on == [True]
    instance.is_closed = True
    with pytest.raises(ApiError, match="no longer served: send the request again") as raised:
        stream.admit_reconnection(ANONYMOUS)
    assert (raised.value.status, raised.value.code, went_on) == (404, "events_gone", [True])
    resume_store.clear()
