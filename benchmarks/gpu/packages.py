"""Installed and missing packages, and the import path of bundled wheels. Imports no torch.

The GPU machine may be bare and offline: the run uses its own torch and Triton.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

_DISTRIBUTIONS = {"pydantic_settings": "pydantic-settings", "prometheus_client": "prometheus-client"}


class WheelsError(ValueError):
    """The folder of wheels cannot be used; the message says why."""


def missing(names: Iterable[str]) -> tuple[str, ...]:
    """Names that cannot be imported, without duplicates, in order."""
    return tuple(name for name in dict.fromkeys(names) if find_spec(name) is None)


def version_of(name: str) -> str:
    """Version of an installed package; empty if it is missing."""
    try:
        return version(_DISTRIBUTIONS.get(name, name))
    except PackageNotFoundError:
        return ""


def download_hint(names: Iterable[str]) -> str:
    """How to bring packages to a machine without a network."""
    wanted = " ".join(_DISTRIBUTIONS.get(name, name) for name in names)
    return f"bring wheels along: pip download --only-binary=:all: -d DIR {wanted}; then WHEELS=DIR make gpu-check"


def install(wheels: Path, site: Path) -> None:
    """Unpacks wheels into `site`, on the import path of this process and its children. Raises WheelsError."""
    files = sorted(str(path) for path in wheels.glob("*.whl"))
    if not files:
        raise WheelsError(f"{wheels}: holds no wheels (*.whl)")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    command = [*pip, "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site), *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip gave no reason"]
        raise WheelsError(f"{wheels}: {lines[-1]}")
    sys.path.insert(0, str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", ""))))
    importlib.invalidate_caches()
