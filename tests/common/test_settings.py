"""Default weights of the service."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.common.settings import INCLUDED_WEIGHTS, Settings
from tests.support import ROOT


def test_bundled_model_is_served_without_a_weights_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings().weights == INCLUDED_WEIGHTS == ROOT / "weights"
    assert Settings(weights=Path("weights")).weights == Path("weights"), "an explicit directory is never replaced"
    monkeypatch.setenv("INKSTREAM_WEIGHTS", "elsewhere")
    assert Settings().weights == Path("elsewhere")
    monkeypatch.delenv("INKSTREAM_WEIGHTS")
    (tmp_path / "weights").mkdir()
    assert Settings().weights == Path("weights")
