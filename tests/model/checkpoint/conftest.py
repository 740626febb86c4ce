"""A weights directory that a test may damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def directory(tmp_path: Path, weights: Path) -> Path:
    """A copy of the tiny weights."""
    return Path(shutil.copytree(weights, tmp_path / "copy"))
