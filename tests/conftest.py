"""Fixtures and hooks: tiny weights on disk, the real service on a real socket, and selection of tests."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from ctypes import CDLL
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import torch
from hypothesis import HealthCheck, settings

from app.engine.cpu.toolchain.builder import find_or_build
from app.engine.cpu.toolchain.cpu_target import BuildError, UnsupportedCpu
from app.engine.guided import grammar_workers
from app.engine.sampling.sampler import sample as torch_sample
from model.device import use_row_invariant_products
from tests.support import ROOT
from tests.support.engine.native_sampler import Sample, compile_sampler, native_sample
from tests.support.fake_compiler import compile_library
from tests.support.longest_files import LONGEST
from tests.support.model.tiny_models import KV_CACHE, TEXT, WAY, kernels, tiny_weights
from tests.support.promise_figures import Promise
from tests.support.servers import Server, forbid_servers, own_servers, start_server, stop_server
from tests.support.services import Services, services

# Triton reads this when it is imported, which nothing above does. Without a GPU, kernels run in its interpreter.
if find_spec("triton") and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
use_row_invariant_products()  # as the engine process does, before the first product
pytest_plugins = ["tests.support.interrupted_run", "tests.support.page.browser"]

TESTS = ROOT / "tests"
# What `--fast` leaves out, besides tests and files marked slow: fixtures that compile or start a service or a browser,
# and folders in which nearly every test does.
SLOW_FIXTURES = {"browser", "native_library", "sampling_library", "serve", "serve_module", "server", "stub_library"}
SLOW_FOLDERS = {TESTS / name for name in ("clients", "page", "promises", "ray")}
SLOW_FILE = re.compile(r"^pytestmark = \[?pytest\.mark\.slow\b", re.MULTILINE)

# No test uses TLS, but each httpx.get() would read the machine's 140 certificates: 25 ms of CPU.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

# httpx times out after 5 s of silence by default, which the service does not promise and a busy machine may exceed.
for _kind in ("connect", "read", "write", "pool"):
    setattr(inspect.signature(httpx.get).parameters["timeout"].default, _kind, 60.0)

# Imported modules and collected tests are never garbage; scanning them took half the CPU time of collection in each
# test process, and part of every test's.
gc.disable()

# The time of an example depends on the machine's other load. All examples of a test share its fixtures.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares the options."""
    parser.addoption("--nightly", action="store_true", help="repeat random tests many more times")
    parser.addoption("--full-size", action="store_true", help="tests of promises at their full sizes (make promises)")
    parser.addoption(
        "--timed", choices=("no", "only"), help="whether to run tests marked timed, which need an idle machine"
    )
    parser.addoption("--fast", action="store_true", help="no tests that are slow or timed (make test-fast)")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers, and forbids services in a fast run."""
    config.addinivalue_line("markers", "timed: compares seconds with a floor, and runs after all other tests")
    config.addinivalue_line("markers", "slow: starts a service, a compiler or a training run, or takes seconds")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script runs pytest in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # or child processes would inherit it
    if config.getoption("--fast"):
        forbid_servers("this test starts a service: mark it slow, so that make test-fast leaves it out")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips files without selected tests, to save reading them."""
    if config.getoption("--fast") and collection_path in SLOW_FOLDERS:
        return True
    if not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text()
    if config.getoption("--fast") and SLOW_FILE.search(text):
        return True
    return True if config.getoption("--timed") == "only" and "pytest.mark.timed" not in text else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts the longest files first, and applies --timed and --fast."""
    ranks = {TESTS / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))
    timed = config.getoption("--timed")
    deselected = [item for item in items if timed and (timed == "only") != bool(item.get_closest_marker("timed"))]
    if config.getoption("--fast"):
        deselected += [item for item in items if _is_slow(item) and item not in deselected]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]


def _is_slow(item: pytest.Item) -> bool:
    marked = any(item.get_closest_marker(name) for name in ("slow", "timed"))
    return marked or not SLOW_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    """Re-enables garbage collection, without the objects of the collection."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Removes logging handlers and hooks that a command run in this process left behind; their streams get closed."""
    root = logging.getLogger()
    level, before, hooks = root.level, list(root.handlers), (sys.excepthook, threading.excepthook)
    yield
    root.setLevel(level)
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook = hooks
    for handler in list(root.handlers):
        if handler not in before and not type(handler).__module__.startswith("_pytest"):  # pytest's are of this phase
            root.removeHandler(handler)


@pytest.fixture(scope="session")
def nightly(request: pytest.FixtureRequest) -> bool:
    """Whether pytest runs with --nightly."""
    return bool(request.config.getoption("--nightly"))


@pytest.fixture
def promise(request: pytest.FixtureRequest) -> Promise:
    """Records the figures of a test of tests/promises."""
    return Promise(request.node.nodeid.partition("[")[0], full=bool(request.config.getoption("--full-size")))


@pytest.fixture(scope="session")
def sampling_library(tmp_path_factory: pytest.TempPathFactory) -> CDLL:
    """The native sampling kernels with entry points for tests."""
    if not shutil.which("g++"):
        pytest.skip("the native sampler needs g++")
    try:
        return compile_sampler(tmp_path_factory.mktemp("native"))
    except UnsupportedCpu as error:
        pytest.skip(f"no native kernels here: {error}")


@pytest.fixture(params=["torch", pytest.param("native", marks=pytest.mark.slow)])
def sample(request: pytest.FixtureRequest) -> Sample:
    """Runs the test with each sampler."""
    if request.param == "torch":
        return torch_sample
    request.getfixturevalue("native_library")
    return native_sample(kernels())


@pytest.fixture(params=["torch", *(pytest.param(way, marks=pytest.mark.slow) for way in ("native", "int8"))])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test with each backend of tiny_engine(); modules may use it for all their tests."""
    if request.param != "torch":
        request.getfixturevalue("native_library")
    before = WAY.set(request.param)
    yield request.param
    WAY.reset(before)


@pytest.fixture
def int8_cache() -> Iterator[None]:
    """Gives tiny_engine() a cache of codes; compare it with generate(kv_cache="int8")."""
    before = KV_CACHE.set("int8")
    yield
    KV_CACHE.reset(before)


@pytest.fixture(autouse=True)
def stop_servers_after_test() -> Iterator[None]:
    """Kills services that a failed test left running.

    Services of modules and of the session started before this fixture, and end with theirs.
    """
    with own_servers():
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread: on a busy machine, two threads take 20 times as long for such small matrices."""
    yield from _with_threads(1)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two torch threads, for tests that must not depend on their number; `make test` sets one for all others."""
    yield from _with_threads(2)


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with the expected interface but without kernels."""
    return compile_library(tmp_path_factory.mktemp("stub"), 'extern "C" int ink_sizes() { return 0; }')


@pytest.fixture(scope="session")
def native_library() -> Path:
    """The kernels for this machine, from the user's cache, built if the cache lacks them."""
    try:
        return find_or_build()
    except (UnsupportedCpu, BuildError) as error:
        pytest.skip(f"no native kernels here: {error}")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A training text."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 5)
    return path


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model in a directory."""
    return tiny_weights(tmp_path_factory.mktemp("weights") / "tiny")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[Server]:
    """The service with the tiny model in float32, shared by all tests that do not change its state."""
    running = start_server(tmp_path_factory.mktemp("server"), weights, "--dtype", "float32")
    yield running
    assert stop_server(running) == 0, running.log.read_text()


@pytest.fixture
def serve(tmp_path: Path, weights: Path) -> Iterator[Services]:
    """Starts services that end with the test."""
    yield from services(tmp_path, weights)


@pytest.fixture(scope="module")
def serve_module(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[Services]:
    """Starts services that end with the module."""
    yield from services(tmp_path_factory.mktemp("services"), weights)


def _with_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _grammar_threads_with_normal_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """While other tests keep all cores busy, threads of the lowest priority would get almost no CPU time."""
    monkeypatch.setattr(grammar_workers, "_NICE", 0)
