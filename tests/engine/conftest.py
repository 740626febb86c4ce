"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest

from app.engine.guided import grammar_workers


@pytest.fixture(autouse=True)
def _grammar_threads_of_ordinary_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """While other tests keep all cores busy, threads of the lowest priority would compute next to nothing."""
    monkeypatch.setattr(grammar_workers, "_NICE", 0)
