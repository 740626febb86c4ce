"""inkstream compile as a person, a Makefile and a container's build stage run it: alone, twice at once, interrupted."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.engine.cpu.toolchain.cpu_target import X86_LEVELS, this_level
from app.engine.cpu.toolchain.library_cache import BuildRecipe
from tests.support import ROOT
from tests.support.fake_compiler import FakeCompiler, fake_compiler
from tests.support.processes import has_exited

pytestmark = pytest.mark.slow

SLOW = "sleep 60"


def _start(cache: Path, *flags: str, folder: Path = ROOT, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-S", "-m", "app", "compile", "--cache-dir", str(cache), *flags]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("INKSTREAM_")}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env={**clean, **environment}, stdout=pipe, stderr=pipe, text=True)


def _run(cache: Path, *flags: str, folder: Path = ROOT, **environment: str) -> tuple[int, str, str]:
    process = _start(cache, *flags, folder=folder, **environment)
    out, errors = process.communicate(timeout=120)
    return process.returncode, out, errors


def _wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != ".lock")


@pytest.fixture
def compiler(tmp_path: Path, stub_library: Path) -> FakeCompiler:
    return fake_compiler(tmp_path, stub_library)


@pytest.fixture
def slow(tmp_path: Path, stub_library: Path) -> FakeCompiler:
    """A compiler that never ends and has a child process, as compilers do."""
    (tmp_path / "slow").mkdir()
    calls = tmp_path / "slow" / "calls"
    return fake_compiler(tmp_path / "slow", stub_library, before=f'{SLOW} & echo $! >> "{calls}"; wait')


def test_compile_reports_the_library_and_check_whether_a_start_would_use_it(
    tmp_path: Path, compiler: FakeCompiler
) -> None:
    cache, level = tmp_path / "cache", this_level().name
    code, out, errors = _run(cache, "--check")
    assert (code, errors) == (1, "") and "using torch" in out and "inkstream compile" in out
    code, out, errors = _run(cache, CXX=str(compiler.path))
    assert (code, errors) == (0, "")
    assert f"{level}: built: {cache}" in out and "fake 1.0" in out
    code, out, _ = _run(cache, "--check", CXX="/nonexistent")
    assert code == 0 and f"using native kernels ({level}): {cache}" in out
    code, out, _ = _run(cache, CXX=str(compiler.path))
    assert code == 0 and f"{level}: already built" in out
    assert len(compiler.pids) == 1


def test_missing_compiler_names_the_package_and_quiet_prints_nothing(tmp_path: Path) -> None:
    code, out, errors = _run(tmp_path / "cache", PATH="/nonexistent", CXX="")
    assert (code, out) == (2, "")
    assert (
        errors.count("\n") == 1 and errors.startswith("error: there is no C++ compiler") and "apt install g++" in errors
    )
    assert _run(tmp_path / "cache", "--quiet", PATH="/nonexistent", CXX="") == (2, "", "")


def test_two_at_once_compile_once(tmp_path: Path, stub_library: Path) -> None:
    fake = fake_compiler(tmp_path, stub_library, before="sleep 1")
    both = [_start(tmp_path / "cache", CXX=str(fake.path)) for _ in range(2)]
    outs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted("already built" in out for out in outs) == [False, True]
    assert len(fake.pids) == 1 and len(_leftovers(tmp_path / "cache")) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_no_file_no_process_and_no_traceback(
    tmp_path: Path, slow: FakeCompiler, number: signal.Signals
) -> None:
    process = _start(tmp_path / "cache", CXX=str(slow.path))
    _wait_for(lambda: len(slow.pids) == 2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, "")
    assert _leftovers(tmp_path / "cache") == []
    assert all(map(has_exited, slow.pids))


def test_killed_build_ends_its_compiler_and_the_next_build_cleans_up(
    tmp_path: Path, slow: FakeCompiler, compiler: FakeCompiler
) -> None:
    process = _start(tmp_path / "cache", CXX=str(slow.path))
    _wait_for(lambda: len(slow.pids) == 2)
    process.kill()
    process.communicate(timeout=120)
    _wait_for(lambda: all(map(has_exited, slow.pids)))
    (stale,) = _leftovers(tmp_path / "cache")
    assert stale.startswith(".building-")
    assert _run(tmp_path / "cache", CXX=str(compiler.path))[0] == 0
    assert stale not in _leftovers(tmp_path / "cache")


def test_container_build_stage_copies_all_that_a_build_needs(tmp_path: Path, compiler: FakeCompiler) -> None:
    """-S hides installed packages, since the build stage has none."""
    stage = (ROOT / "Dockerfile").read_text().split(" AS kernels\n")[1].split("\nFROM ")[0]
    for line in re.findall(r"^COPY (.*)$", stage, re.MULTILINE):
        *sources, target = line.split()
        for source in map(Path, sources):
            folder = tmp_path / "stage" / target
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, folder, ignore=shutil.ignore_patterns("__pycache__", "built"))
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, folder)
    (command,) = re.findall(r"python3 -m app compile (.*) --cache-dir /kernels$", stage, re.MULTILINE)
    code, _, errors = _run(
        tmp_path / "cache", *command.split(), folder=tmp_path / "stage", PYTHONPATH="", CXX=str(compiler.path)
    )
    assert (code, errors) == (0, "")
    levels = X86_LEVELS if this_level() in X86_LEVELS else (this_level(),)
    assert {BuildRecipe(level=level).name for level in levels} <= set(_leftovers(tmp_path / "cache"))


def test_compiler_beyond_its_time_limit_is_killed(tmp_path: Path, slow: FakeCompiler) -> None:
    code, _, errors = _run(tmp_path / "cache", "--quiet", "--time-limit", "0.5", CXX=str(slow.path))
    message = f"error: {slow.path} took more than 0.5 seconds; inkstream compile --time-limit gives it more\n"
    assert (code, errors) == (1, message)
    assert _leftovers(tmp_path / "cache") == []
