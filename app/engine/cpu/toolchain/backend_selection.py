"""Selects the CPU backend, native kernels or torch, once when an engine starts.

          service, at startup                 engine, which knows device and model
torch     -                                   torch
auto      finds a library, builds none        the library, if it supports this model; else torch
auto*     finds a library, builds none        as native; * where torch is not installed
native    -                                   the library, built if necessary; fails if that is not possible
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.common.startup_timer import BUILDING_KERNELS
from app.engine.cpu.toolchain.builder import check_loads, compiler_commands, find_or_build
from app.engine.cpu.toolchain.cpu_target import BuildError, KernelsUnavailable, this_level
from app.engine.cpu.toolchain.library_cache import is_valid_library
from model.config import ModelConfig

Kernels = Literal["auto", "native", "torch"]
TORCH = "torch"
NATIVE, TORCH_NUMERICS = "native3", "torch2"
"""The numbers count the versions of the kernels, and of the torch backend, that compute other bits."""
_DTYPES = ("bfloat16", "float32")
_ONLY_CPU = "they are for CPUs only"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedBackend:
    """The native kernels in `library`, or torch if there is none."""

    library: Path | None = None
    numerics: str = TORCH_NUMERICS
    """Name of the backend in receipts: equal names on equal hardware and builds give equal bits."""
    reason: str
    """Why it was selected, for the log."""
    waits_for_build: bool = False
    """Native kernels support this model and machine, but are not built yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Libraries:
    """Where native kernels were found, and where a build stores them."""

    found: Path | None = None
    """Library that the service found at startup."""
    cache_dir: Path | None = None
    has_torch: bool = True
    """Whether torch can compute until a build is done."""

    @classmethod
    def of(cls, found: str | None, cache_dir: str | None, has_torch: bool) -> Libraries:
        """From the fields of WorkerConfig."""
        library, directory = (Path(name) if name else None for name in (found, cache_dir))
        return cls(found=library, cache_dir=directory, has_torch=has_torch)


def select_backend(
    kernels: Kernels,
    dtype: str,
    device: str,
    config: ModelConfig,
    libraries: Libraries,
    announce: Callable[[str], None],
) -> SelectedBackend:
    """Selects the backend for a model on a device ("cpu") in a number format ("bfloat16").

    `announce` is called before a build starts. A restarted engine must compute exactly like the one before it, so
    "auto" uses the library that the service found at startup and nothing newer, and rebuilds it if it was removed.
    Where torch is not installed, nothing else can compute meanwhile: the engine builds the kernels and waits for them.
    Raises ValueError if "native" is not possible.
    """
    if kernels == TORCH:
        return SelectedBackend(reason="--kernels torch")
    try:
        level = this_level()
        _check_model(dtype, device, config)
        if libraries.found and not libraries.found.name.startswith(f"inkstream-{level.name}-"):
            raise KernelsUnavailable(
                f"the engine may use level {level.name} only, and the service found {libraries.found}"
            )
        if kernels == "auto" and libraries.found is None and libraries.has_torch:
            return SelectedBackend(reason="the native kernels are not built", waits_for_build=True)
        library = _library(libraries, announce)
        check_loads(library)
    except KernelsUnavailable as error:
        if kernels == "auto":
            return SelectedBackend(reason=str(error))
        raise _unavailable_error(error) from None
    except BuildError as error:
        if kernels == "auto":
            if libraries.found is None:
                return SelectedBackend(reason=str(error))
            raise ValueError(f"{libraries.found}, which this service started with, no longer exists: {error}") from None
        raise _unavailable_error(error) from None
    return SelectedBackend(library=library, numerics=f"{NATIVE}-{level.name}", reason=str(library))


def check_native_available(kernels: Kernels, device: str, libraries: Libraries) -> None:
    """Checks early, before any slow step, that "native" is possible if requested. Raises ValueError."""
    if kernels != "native":
        return
    try:
        if device == "cuda":
            raise KernelsUnavailable(_ONLY_CPU)
        this_level()
        if libraries.found is None:
            compiler_commands()
    except ValueError as error:
        raise _unavailable_error(error) from None


def _unavailable_error(error: ValueError) -> ValueError:
    return ValueError(f"--kernels native is not possible: {error}; or use --kernels auto")


def _check_model(dtype: str, device: str, config: ModelConfig) -> None:
    """Raises KernelsUnavailable if the native kernels do not support the model."""
    if device != "cpu":
        raise KernelsUnavailable(_ONLY_CPU)
    if dtype not in _DTYPES:
        raise KernelsUnavailable(f"they compute in {' and '.join(_DTYPES)}, not in {dtype}")
    if config.n_encoder_layers:
        raise KernelsUnavailable("they do not support models with an encoder")
    if config.n_heads * config.head_dim % 2:
        raise KernelsUnavailable("they do not support an odd n_heads * head_dim")


def _library(libraries: Libraries, announce: Callable[[str], None]) -> Path:
    """The library that was found, or a new build. Raises BuildError."""
    if libraries.found and is_valid_library(libraries.found):
        return libraries.found
    return find_or_build(libraries.cache_dir, lambda _: announce(BUILDING_KERNELS))
