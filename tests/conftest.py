"""Fixtures: tiny weights on disk, and the real service around them on a real socket."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import inspect
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from ctypes import CDLL
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import torch
from fake_compiler import compiled
from hypothesis import HealthCheck, settings
from longest import LONGEST
from native import Sample, native_sample
from native import compiled as compiled_sampler
from promise import Promise
from tiny import TEXT, WAY, tiny_weights

from app.engine.cpu.toolchain.builder import find_or_build
from app.engine.cpu.toolchain.cpu_target import BuildError, UnsupportedCpu
from app.engine.cpu.toolchain.library_cache import ABI
from app.engine.sampling.sampler import sample as torch_sample

ROOT = Path(__file__).parent.parent
# Triton looks when it is imported, which nothing above does. Without a GPU its kernels run in its interpreter.
if find_spec("triton") and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest_plugins = ["hand"]  # tests/page: fixtures of a real browser

# No test speaks TLS, but httpx.get() would read the machine's 140 certificates each time it is called: 25 ms of CPU.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

# httpx times out after 5 s of silence by default. The service does not promise to answer within that, and a busy
# machine may be silent for longer.
for _kind in ("connect", "read", "write", "pool"):
    setattr(inspect.signature(httpx.get).parameters["timeout"].default, _kind, 60.0)

# What the test files import and what becomes of them stays; looking for garbage in it took half of the collection's CPU
# time in each test process, and then a part of every test's.
gc.disable()

# How long an example takes is decided by who else is on the machine. The service is one for all examples of a test.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """--nightly: the tests that repeat something run many times as long."""
    parser.addoption("--nightly", action="store_true", help="repeat random tests many more times")
    parser.addoption("--full-size", action="store_true", help="tests of promises at their full sizes (make promises)")
    parser.addoption("--timed", choices=("no", "only"), help="tests marked timed, which want no others beside them")


def pytest_configure(config: pytest.Config) -> None:
    """The one marker of ours."""
    config.addinivalue_line("markers", "timed: holds seconds against a floor, and is run when all others have ended")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without timed tests need not be read for them."""
    if config.getoption("--timed") != "only" or not collection_path.match("test_*.py"):
        return None
    return None if "pytest.mark.timed" in collection_path.read_text() else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first; timed tests only, or all others, where that is asked for."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    timed = config.getoption("--timed")
    others = [item for item in items if timed and (timed == "only") != bool(item.get_closest_marker("timed"))]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def pytest_collection_finish() -> None:
    """From here on tests make garbage."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A verb that a test runs in this process leaves a handler, whose stream is closed when the next one logs."""
    root = logging.getLogger()
    level, before, hooks = root.level, list(root.handlers), (sys.excepthook, threading.excepthook)
    yield
    root.setLevel(level)
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook = hooks
    for handler in list(root.handlers):
        if handler not in before and not type(handler).__module__.startswith("_pytest"):  # those are of this phase
            root.removeHandler(handler)


@pytest.fixture(scope="session")
def nightly(request: pytest.FixtureRequest) -> bool:
    """Whether there is a night's time."""
    return bool(request.config.getoption("--nightly"))


@pytest.fixture
def promise(request: pytest.FixtureRequest) -> Promise:
    """Takes the figures of a test of tests/promises."""
    return Promise(request.node.nodeid.partition("[")[0], full=bool(request.config.getoption("--full-size")))


@pytest.fixture(scope="session")
def sampling_library(tmp_path_factory: pytest.TempPathFactory) -> CDLL:
    """The native sampling kernels alone, with entry points for tests."""
    if not shutil.which("g++"):
        pytest.skip("the native sampler needs g++")
    return compiled_sampler(tmp_path_factory.mktemp("native"))


@pytest.fixture(params=["torch", "native"])
def sample(request: pytest.FixtureRequest) -> Sample:
    """Both samplers: the same laws hold for each."""
    if request.param == "torch":
        return torch_sample
    return native_sample(request.getfixturevalue("sampling_library"))


@pytest.fixture(params=["torch", "native", "int8"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How tiny_engine() computes in this test; modules whose laws hold for every way use it for all their tests."""
    if request.param != "torch":
        request.getfixturevalue("native_library")
    before = WAY.set(request.param)
    yield request.param
    WAY.reset(before)


@dataclass(frozen=True, slots=True)
class Server:
    """A running service."""

    url: str
    process: subprocess.Popen[str]
    log: Path

    def metric(self, name: str) -> float:
        """A gauge or counter; labels belong to the name."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        found = re.search(rf"^inkstream_{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, f"no metric {name}"
        return float(found.group(1))

    def told(self) -> str:
        """The whole lines of the log: the last one may be half written."""
        return _whole_lines(self.log)

    def tells(self, *words: str, since: int = 0) -> bool:
        """Whether all these words come to the log behind so many characters: a thread of its own writes it, later."""
        return self.wait_for(lambda: all(word in self.told()[since:] for word in words))

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60.0) -> bool:
        """Polls until `condition` holds or the time is over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.02)
        return condition()


_STARTED: list[subprocess.Popen[str]] = []
"""Every service that start_server() has started and no test has stopped yet."""


@pytest.fixture(autouse=True)
def servers_end_with_their_test() -> Iterator[None]:
    """A test that fails between start_server() and stop_server() must not take the next one with it.

    Services of modules and of the session were started before this fixture is, and end with their own.
    """
    before = list(_STARTED)
    yield
    for process in [process for process in _STARTED if process not in before]:
        _kill(process)


def start_server(
    folder: Path,
    weights: Path,
    *flags: str,
    wait: bool = True,
    sabotage: str = "pass",
    environment: Mapping[str, str] | None = None,
    fake_ms: float | None = None,
    terminal: int | None = None,
) -> Server:
    """`python -m app serve` on a free port; ready when this returns. `sabotage` is Python that runs first.

    `fake_ms`: around the fake engine of tests/promises, whose steps take so long. `terminal`: a descriptor of the one
    that it hangs on.
    """
    program = f"import sys; from app.__main__ import main; exec({sabotage!r}); sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program]
    if fake_ms is not None:
        assert sabotage == "pass", "the fake service takes faults"
        command = [sys.executable, str(ROOT / "tests/promises/fake_service.py"), str(fake_ms)]
    log = folder / f"server-{time.monotonic_ns()}.log"
    variables = {k: v for k, v in os.environ.items() if not k.startswith("INKSTREAM_")} | dict(environment or {})
    # What computes must not depend on what this machine has built before, and no test pays for a build by the way.
    variables["INKSTREAM_KERNELS"] = "torch"
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [variables.get("PYTHONPATH")])])
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "serve", "--weights", str(weights), "--port", "0", *flags],
            cwd=ROOT,
            env=variables,
            stderr=file,
            stdout=file,
            text=True,
            preexec_fn=None if terminal is None else lambda: _hang_on(terminal),
        )
    _STARTED.append(process)
    try:
        return _ready_server(process, log, wait=wait)
    except BaseException:
        _kill(process)
        raise


def _ready_server(process: subprocess.Popen[str], log: Path, *, wait: bool) -> Server:
    """As soon as it listens; with `wait`, as soon as it completes texts."""
    deadline = time.monotonic() + 120
    while True:
        has_ended = process.poll() is not None  # looked at first: all that it has said before is in the log
        if found := re.search(r"listening on (http://[^\s\"]+)", _whole_lines(log)):
            break
        assert not has_ended and time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    server = Server(found.group(1), process, log)
    asked_next = 0.0
    while wait:
        # Reading the log costs next to nothing; a question each time would cost both sides a tenth of the start.
        if "ready: " in log.read_text() or time.monotonic() >= asked_next:
            asked_next = time.monotonic() + 0.5  # for services that log no such thing
            if _status(server.url) == 200:
                break
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    return server


def _whole_lines(log: Path) -> str:
    whole, newline, _ = log.read_bytes().rpartition(b"\n")
    return (whole + newline).decode()


def _hang_on(terminal: int) -> None:
    """In the child: this is the terminal that it hangs on."""
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def stop_server(server: Server) -> int:
    """SIGTERM, and the exit code."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
    try:
        return server.process.wait(timeout=120)
    except subprocess.TimeoutExpired:
        _kill(server.process)
        raise


def _kill(process: subprocess.Popen[str]) -> None:
    """With its engines, of which one may be stopped."""
    if process.poll() is None:
        children = [child for task in Path(f"/proc/{process.pid}/task").iterdir() for child in _children_of(task)]
        process.kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    process.wait()
    _STARTED.remove(process)


def _children_of(task: Path) -> list[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread may end while we look
        return [int(child) for child in (task / "children").read_text().split()]
    return []


def is_clean(server: Server, seconds: float = 60.0) -> bool:
    """Whether within this time nothing runs, nothing waits, and no cache block is in use."""
    names = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
    return server.wait_for(lambda: not any(server.metric(name) for name in names), seconds)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matrices this small cost 20 times as much when two threads share them on a busy machine."""
    yield from _with_threads(1)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """For laws that must not know how many threads there are; `make test` gives one to all others."""
    yield from _with_threads(2)


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with the right interface and no kernel in it."""
    return compiled(tmp_path_factory.mktemp("stub"), f'extern "C" int ink_abi() {{ return {ABI}; }}')


@pytest.fixture(scope="session")
def native_library() -> Path:
    """The real kernels for this machine, from the current user's cache; built if the cache lacks them."""
    try:
        return find_or_build()
    except (UnsupportedCpu, BuildError) as error:
        pytest.skip(f"no native kernels here: {error}")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file to learn from."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 5)
    return path


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model in a directory."""
    return tiny_weights(tmp_path_factory.mktemp("weights") / "tiny")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[Server]:
    """The service around the tiny model, in float32, shared by all tests that leave it as they found it."""
    running = start_server(tmp_path_factory.mktemp("server"), weights, "--dtype", "float32")
    yield running
    assert stop_server(running) == 0, running.log.read_text()


def _with_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def _status(url: str) -> int:
    try:
        return httpx.get(f"{url}/health/ready").status_code
    except httpx.TransportError:
        return 0
