"""How a device computes the loss: hand-written gradients, torch's own, or compiled (--compile). No torch.

         | --compile off     | auto                                       | on
    CPU  | gradients by hand | gradients by hand                          | torch's own, compiled (C++)
    CUDA | torch's own       | compiled where Triton and a C compiler are | compiled, or an error

Hand-written gradients spare a CPU passes over memory; on a GPU they would be thousands of small kernels.
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

Asked = Literal["auto", "on", "off"]
ASKED: tuple[Asked, ...] = get_args(Asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBackend:
    """One way to compute the loss."""

    by_hand: bool = False
    """Whether gradients are those written out in this package; else torch's own, of plain modules."""
    backend: str | None = None
    """Of torch.compile; None: not compiled."""
    may_fall_back: bool = False
    """Whether a compiler that fails is only warned of."""


def choose(asked: Asked, device: str, *, missing: str = "", has_encoder: bool = False) -> LossBackend:
    """device: cpu | cuda. missing: what a compiler for it lacks here. Raises ValueError.

    Rows of an encoder differ in length from step to step, and each length would be compiled anew.
    """
    if asked == "on" and has_encoder:
        raise ValueError("--compile on: a model with an encoder is not compiled; leave the flag out")
    if asked == "on" and missing:
        raise ValueError(f"--compile on needs {missing}, which is missing here; install it, or leave the flag out")
    if asked == "on" or (asked == "auto" and device == "cuda" and not missing and not has_encoder):
        return LossBackend(backend="inductor", may_fall_back=asked == "auto")
    return LossBackend(by_hand=device == "cpu")


def missing_for(device: str, environment: Mapping[str, str] = os.environ) -> str:
    """What torch's compiler needs for a device and this machine has not; nothing where it has all."""
    if device == "cuda" and find_spec("triton") is None:
        return "the package triton"
    language, variable, usual = ("C", "CC", ("gcc", "clang", "cc")) if device == "cuda" else ("C++", "CXX", ("g++",))
    named = environment.get(variable)
    if not any(map(shutil.which, [named] if named else usual)):
        return f"a {language} compiler ({named or ' or '.join(usual)}; ${variable} names another)"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's header files (python3-dev)"
    return ""


def computing_for(asked: Asked, device: str, *, has_encoder: bool = False) -> LossBackend:
    """What `asked` means on this machine. Raises ValueError."""
    missing = "" if asked == "off" or (asked, device) == ("auto", "cpu") else missing_for(device)
    return choose(asked, device, missing=missing, has_encoder=has_encoder)
