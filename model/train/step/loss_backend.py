"""How a device computes the loss: handwritten gradients, torch's autograd, or compiled (--compile).

         | --compile off     | auto                                       | on
    CPU  | gradients by hand | gradients by hand                          | torch's own, compiled (C++)
    CUDA | torch's own       | compiled where Triton and a C compiler are | compiled, or an error

Handwritten gradients save memory passes on a CPU; on a GPU they would be thousands of small kernels.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

CompileMode = Literal["auto", "on", "off"]
COMPILE_MODES: tuple[CompileMode, ...] = get_args(CompileMode)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBackend:
    """One way to compute the loss."""

    is_handwritten: bool = False
    """Whether to use the handwritten gradients of this package instead of autograd."""
    backend: str | None = None
    """Backend of torch.compile; None means not compiled."""
    may_fall_back: bool = False
    """Whether a compiler failure is only a warning."""


def choose_loss_backend(mode: CompileMode, device: str, *, has_encoder: bool = False) -> LossBackend:
    """The backend for --compile on this machine. device: cpu | cuda. Raises ValueError.

    Models with an encoder are not compiled: their rows vary in length, and each length would be compiled separately.
    """
    if mode == "off" or (mode == "auto" and (device == "cpu" or has_encoder)):
        return LossBackend(is_handwritten=device == "cpu")
    if has_encoder:
        raise ValueError("--compile on: a model with an encoder is not compiled; omit the flag")
    missing = missing_for(device)
    if missing and mode == "on":
        raise ValueError(f"--compile on needs {missing}, which is missing here; install it, or omit the flag")
    return LossBackend() if missing else LossBackend(backend="inductor", may_fall_back=mode == "auto")


def missing_for(device: str, environment: Mapping[str, str] = os.environ) -> str:
    """What torch's compiler needs for a device but this machine lacks; empty if nothing is missing."""
    if device == "cuda" and find_spec("triton") is None:
        return "the package triton"
    language, variable, usual = ("C", "CC", ("gcc", "clang", "cc")) if device == "cuda" else ("C++", "CXX", ("g++",))
    named = environment.get(variable)
    if not any(map(shutil.which, [named] if named else usual)):
        return f"a {language} compiler ({named or ' or '.join(usual)}; ${variable} names another)"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's header files (python3-dev)"
    return ""
