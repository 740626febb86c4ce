"""Native kernels in the real service: selected once, built in the background, named in receipts, stopped with it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from app.engine.cpu.toolchain.cpu_target import this_level
from app.engine.cpu.toolchain.library_cache import BuildRecipe
from benchmarks.service_process import ServiceStartError
from model.machine import has_native_bfloat16
from tests.support.completion_client import fetch_completion
from tests.support.fake_compiler import FakeCompiler, fake_compiler
from tests.support.load.concurrent_clients import engine_pid
from tests.support.processes import has_exited
from tests.support.servers import Server, running_server, start_server, stop_server

pytestmark = pytest.mark.slow

DTYPE = "bfloat16" if has_native_bfloat16() else "float32"
"""What --dtype auto means on this machine."""
BUILDING = "building native kernels for the next start"
BUILT = "native kernels are built: restart to use them"


@pytest.fixture
def slow(tmp_path: Path, stub_library: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """A compiler that blocks until a file named `go` exists."""
    fake = fake_compiler(tmp_path, stub_library, before=f'while [ ! -e "{tmp_path / "go"}" ]; do sleep 0.1; done')
    monkeypatch.setenv("CXX", str(fake.path))
    return fake


def _wait_for(server: Server, condition: Callable[[], bool]) -> None:
    """Waits for minutes: the build has the lowest priority, and other processes may use both cores."""
    assert server.wait_for(condition, 300), server.log.read_text()


def _wait_for_log(server: Server, words: str, times: int = 1) -> None:
    _wait_for(server, lambda: server.log.read_text().count(words) >= times)


def _numerics(server: Server) -> set[str]:
    receipt = fetch_completion(server.url, prompt="a", max_tokens=2)["receipt"]["numerics"]
    numerics = re.findall(r"numerics (\S+)", server.log.read_text())
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    return {receipt, model["numerics"], *numerics}


def _leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.name != ".lock"]


def test_service_without_kernels_uses_torch_and_builds_them_for_the_next_start(
    tmp_path: Path, weights: Path, slow: FakeCompiler
) -> None:
    cache = tmp_path / "cache"
    with running_server(tmp_path, weights, "--kernels", "auto", "--cache-dir", str(cache)) as server:
        _wait_for_log(server, BUILDING)
        _wait_for(server, lambda: bool(slow.pids))
        (compiler,) = slow.pids
        assert os.sched_getscheduler(compiler) == os.SCHED_IDLE and os.getpriority(os.PRIO_PROCESS, compiler) == 19
        (tmp_path / "go").write_text("")
        _wait_for_log(server, BUILT)
        assert (cache / BuildRecipe(level=this_level()).name).exists()
        os.kill(engine_pid(server), signal.SIGKILL)
        _wait_for_log(server, "ready: ", 2)
        assert _numerics(server) == {f"torch2-{DTYPE}"}, "a restarted engine must compute like the one before it"


@pytest.mark.parametrize("is_killed", [False, True])
def test_build_ends_with_the_service_and_leaves_no_files(
    tmp_path: Path, weights: Path, slow: FakeCompiler, is_killed: bool
) -> None:
    cache = tmp_path / "cache"
    server = start_server(tmp_path, weights, "--kernels", "auto", "--cache-dir", str(cache), fake_ms=1)
    _wait_for(server, lambda: bool(slow.pids))
    if is_killed:
        server.process.kill()
        server.process.wait()
    else:
        assert stop_server(server) == 0
    _wait_for(server, lambda: all(map(has_exited, slow.pids)) and _leftovers(cache) == [])
    assert "Traceback" not in server.log.read_text()


def _broken_compiler(folder: Path, library: Path) -> str:
    return str(fake_compiler(folder, library, before='echo "a.h:1: error: bad" >&2; exit 1').path)


@pytest.mark.parametrize("is_missing", [False, True])
def test_failed_kernel_build_is_one_line_in_the_log(
    tmp_path: Path, weights: Path, stub_library: Path, monkeypatch: pytest.MonkeyPatch, is_missing: bool
) -> None:
    compiler = "/nonexistent" if is_missing else _broken_compiler(tmp_path, stub_library)
    monkeypatch.setenv("CXX", compiler)
    flags = ("--kernels", "auto", "--cache-dir", str(tmp_path / "cache"))
    failure = f'native kernels could not be built, using torch: {compiler} failed: a.h:1: error: bad"}}\n'
    missing = f"native kernels would be faster: CXX names '{compiler}'"
    with running_server(tmp_path, weights, *flags, fake_ms=1) as server:
        _wait_for_log(server, missing if is_missing else failure)


def test_existing_kernels_are_used_without_a_build(
    tmp_path: Path, weights: Path, native_library: Path, slow: FakeCompiler
) -> None:
    with running_server(tmp_path, weights, "--kernels", "auto", "--cache-dir", str(native_library.parent)) as server:
        assert _numerics(server) == {f"native3-{this_level().name}-{DTYPE}"}
        os.kill(engine_pid(server), signal.SIGKILL)
        _wait_for_log(server, "ready: ", 2)
        assert _numerics(server) == {f"native3-{this_level().name}-{DTYPE}"}
    assert BUILDING not in server.log.read_text() and not slow.pids


@pytest.mark.parametrize("is_missing", [False, True])
def test_unavailable_native_kernels_end_the_start_if_requested(
    tmp_path: Path, weights: Path, stub_library: Path, monkeypatch: pytest.MonkeyPatch, is_missing: bool
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent" if is_missing else _broken_compiler(tmp_path, stub_library))
    with pytest.raises(ServiceStartError, match="error: --kernels native is not possible: ") as raised:
        start_server(tmp_path, weights, "--kernels", "native", "--cache-dir", str(tmp_path / "cache"))
    reason = "CXX names '/nonexistent'" if is_missing else "a.h:1: error: bad"
    assert reason in str(raised.value) and "Traceback" not in str(raised.value)
