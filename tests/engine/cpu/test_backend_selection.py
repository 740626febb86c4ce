"""Backend selection for every setting, model and library; impossible ones are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.engine.cpu.toolchain.backend_selection import (
    Kernels,
    Libraries,
    SelectedBackend,
    check_native_available,
    select_backend,
)
from app.engine.cpu.toolchain.builder import find_or_build
from app.engine.cpu.toolchain.cpu_target import X86_LEVELS, UnsupportedCpu, this_level
from model.config import ModelConfig
from tests.support.fake_compiler import compile_library, fake_compiler
from tests.support.model.tiny_models import tiny_config


@pytest.fixture
def cache_dir(tmp_path: Path, stub_library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a fake compiler that fills it."""
    monkeypatch.setattr("app.engine.cpu.toolchain.builder.PACKAGED", tmp_path / "nothing")
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, stub_library).path))
    return tmp_path / "cache"


def _choose(
    kernels: Kernels,
    libraries: Libraries,
    *,
    model: ModelConfig | None = None,
    device: str = "cpu",
    dtype: str = "bfloat16",
    phases: list[str] | None = None,
) -> SelectedBackend:
    return select_backend(
        kernels, dtype, device, model or tiny_config(), libraries, (phases if phases is not None else []).append
    )


def test_kernels_torch_ignores_libraries(cache_dir: Path) -> None:
    choice = _choose("torch", Libraries(found=find_or_build(cache_dir), cache_dir=cache_dir))
    assert (choice.library, choice.numerics, choice.waits_for_build) == (None, "torch2", False)


def test_auto_uses_a_found_library_and_builds_none(cache_dir: Path) -> None:
    choice = _choose("auto", Libraries(cache_dir=cache_dir))
    assert (choice.library, choice.numerics, choice.waits_for_build) == (None, "torch2", True)
    assert not cache_dir.exists()
    library = find_or_build(cache_dir)
    assert _choose("auto", Libraries(cache_dir=cache_dir)) == choice, (
        "a library built after the start is for the next service"
    )
    choice = _choose("auto", Libraries(found=library, cache_dir=cache_dir))
    assert (choice.library, choice.waits_for_build) == (library, False)
    assert choice.numerics == f"native3-{this_level().name}"


def test_auto_without_torch_builds_a_missing_library_and_waits(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = Libraries(cache_dir=cache_dir, has_torch=False)
    phases: list[str] = []
    choice = _choose("auto", libraries, phases=phases)
    assert (choice.library, choice.waits_for_build, phases) == (
        find_or_build(cache_dir), False, ["building native kernels"]
    )  # fmt: skip
    assert _choose("auto", libraries) == choice, "a restarted engine computes the same"
    assert choice.library
    choice.library.unlink()
    monkeypatch.setenv("CXX", "/nonexistent")
    choice = _choose("auto", libraries)
    assert choice.library is None and choice.reason.startswith("CXX names")


def test_library_that_disappeared_is_built_again(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted engine must compute like the one before it."""
    library = find_or_build(cache_dir)
    library.unlink()
    phases: list[str] = []
    assert _choose("auto", Libraries(found=library, cache_dir=cache_dir), phases=phases).library == library
    assert phases == ["building native kernels"]
    library.unlink()
    monkeypatch.setenv("CXX", "/nonexistent")
    with pytest.raises(ValueError, match="which this service started with, no longer exists: CXX names"):
        _choose("auto", Libraries(found=library, cache_dir=cache_dir))


def test_kernels_native_builds_and_reports_it(cache_dir: Path) -> None:
    phases: list[str] = []
    choice = _choose("native", Libraries(cache_dir=cache_dir), phases=phases)
    assert (choice.library, phases) == (find_or_build(cache_dir), ["building native kernels"])


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"device": "cuda"}, "CPUs only"),
        ({"dtype": "float16"}, "not in float16"),
        ({"model": tiny_config(n_encoder_layers=1)}, "encoder"),
    ],
)
def test_unsupported_models_run_on_torch(cache_dir: Path, odd: dict[str, str], words: str) -> None:
    for found in (find_or_build(cache_dir), None):
        _check_that_torch_computes(Libraries(found=found, cache_dir=cache_dir), words, **odd)


def _check_that_torch_computes(libraries: Libraries, words: str, **odd: Any) -> None:
    """Also checks that explicitly requested native kernels are refused with the same reason."""
    choice = _choose("auto", libraries, **odd)
    assert (choice.library, choice.waits_for_build) == (None, False) and words in choice.reason
    with pytest.raises(ValueError, match=f"--kernels native is not possible: .*{words}"):
        _choose("native", libraries, **odd)


def test_unsupported_cpu_runs_on_torch(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise UnsupportedCpu("this CPU has no avx2")

    monkeypatch.setattr("app.engine.cpu.toolchain.backend_selection.this_level", none)
    _check_that_torch_computes(Libraries(cache_dir=cache_dir), "no avx2")
    with pytest.raises(ValueError, match="--kernels native is not possible: this CPU has no avx2"):
        check_native_available("native", "auto", Libraries())


@pytest.mark.skipif(this_level() == X86_LEVELS[-1], reason="no library of this machine is above the lowest level")
def test_library_above_the_level_of_the_engine_falls_back_to_torch(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox may restrict the processes of a service differently; the library would crash the engine."""
    libraries = Libraries(found=find_or_build(cache_dir), cache_dir=cache_dir)
    monkeypatch.setattr("app.engine.cpu.toolchain.backend_selection.this_level", lambda: X86_LEVELS[-1])
    _check_that_torch_computes(libraries, "level avx2 only")


def test_library_that_does_not_load_falls_back_to_torch(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loaded when it was built; since then the system changed, or the disk was remounted noexec."""
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, compile_library(tmp_path, "int other() { return 1; }")).path))
    monkeypatch.setattr("app.engine.cpu.toolchain.builder._check_library", lambda *_: None)
    _check_that_torch_computes(Libraries(found=find_or_build(cache_dir), cache_dir=cache_dir), "does not load")


def test_kernels_native_is_refused_before_the_model_loads_if_possible(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = find_or_build(cache_dir)
    with pytest.raises(ValueError, match="CPUs only"):
        check_native_available("native", "cuda", Libraries(found=library))
    check_native_available("native", "cpu", Libraries())
    monkeypatch.setenv("CXX", "/nonexistent")
    check_native_available("native", "cpu", Libraries(found=library))
    with pytest.raises(ValueError, match="CXX names"):
        check_native_available("native", "cpu", Libraries())
