"""Selects the CPU backend, native kernels or torch, once when an engine starts.

          the service at its start            the engine, which knows device and model
torch     -                                   torch
auto      looks for a library, builds none    the library, where it can compute this model; else torch
native    -                                   the library, built if need be; refuses to start where that cannot be
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.common.startup_timer import BUILDING_KERNELS
from app.engine.cpu.toolchain.builder import check_loads, compiler_commands, find_or_build
from app.engine.cpu.toolchain.cpu_target import BuildError, Unusable, this_level
from app.engine.cpu.toolchain.library_cache import is_sound
from model.config import ModelConfig

Kernels = Literal["auto", "native", "torch"]
TORCH = "torch"
_DTYPES = ("bfloat16", "float32")
_ONLY_CPU = "they are for CPUs only"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedBackend:
    """The native kernels of `library`, or torch where there is none."""

    library: Path | None = None
    numerics: str = TORCH
    """What computes, as receipts name it: equal names on equal hardware and builds give equal bits."""
    reason: str
    """Why, for the log."""
    waits_for_build: bool = False
    """Native kernels could compute this model here; they are only not built yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Libraries:
    """Where native kernels are, and may be put."""

    found: Path | None = None
    """What the service found at its start."""
    cache_dir: Path | None = None

    @classmethod
    def of(cls, found: str | None, cache_dir: str | None) -> Libraries:
        """From what crosses the pipe."""
        return cls(found=Path(found) if found else None, cache_dir=Path(cache_dir) if cache_dir else None)


def choose(
    kernels: Kernels,
    dtype: str,
    device: str,
    config: ModelConfig,
    libraries: Libraries,
    announce: Callable[[str], None],
) -> SelectedBackend:
    """For a model on a device ("cpu") in a number format ("bfloat16"). Raises ValueError where "native" cannot be.

    `announce` hears of a build before it begins. An engine that starts again must not take another path than the one
    before it, so "auto" takes what the service found at its start and nothing newer; where that is gone it is built
    again.
    """
    if kernels == TORCH:
        return SelectedBackend(reason="--kernels torch")
    try:
        level = this_level()
        _check_model(dtype, device, config)
        if kernels == "auto" and libraries.found is None:
            return SelectedBackend(reason="the native kernels are not built", waits_for_build=True)
        library = _library(libraries, announce)
        check_loads(library)
    except Unusable as error:
        if kernels == "auto":
            return SelectedBackend(reason=str(error))
        raise _refusal(error) from None
    except BuildError as error:
        if kernels == "auto":
            raise ValueError(f"{libraries.found}, by which this service began, is gone: {error}") from None
        raise _refusal(error) from None
    return SelectedBackend(library=library, numerics=f"native-{level.name}", reason=str(library))


def check_possible(kernels: Kernels, device: str, libraries: Libraries) -> None:
    """Refuses, before anything slow begins, what can never be: "native" asked for in vain. Raises ValueError."""
    if kernels != "native":
        return
    try:
        if device == "cuda":
            raise Unusable(_ONLY_CPU)
        this_level()
        if libraries.found is None:
            compiler_commands(os.environ)
    except ValueError as error:
        raise _refusal(error) from None


def _refusal(error: ValueError) -> ValueError:
    return ValueError(f"--kernels native cannot be: {error}; or take --kernels auto")


def _check_model(dtype: str, device: str, config: ModelConfig) -> None:
    """Raises Unusable for what the native kernels do not compute."""
    if device != "cpu":
        raise Unusable(_ONLY_CPU)
    if dtype not in _DTYPES:
        raise Unusable(f"they compute in {' and '.join(_DTYPES)}, not in {dtype}")
    if config.n_encoder_layers:
        raise Unusable("they know no models with an encoder")
    if config.n_heads * config.head_dim % 2:
        raise Unusable("they know no heads that are an odd number of numbers together")


def _library(libraries: Libraries, announce: Callable[[str], None]) -> Path:
    """Raises BuildError."""
    if libraries.found and is_sound(libraries.found):
        return libraries.found
    return find_or_build(libraries.cache_dir, lambda _: announce(BUILDING_KERNELS))
