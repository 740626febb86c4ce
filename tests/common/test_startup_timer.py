"""Startup times of an engine, by phase, and the directory that Triton gets for its kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.common.startup_timer import (
    CAPTURING_GRAPHS,
    LOADING_WEIGHTS,
    PHASES,
    PROVING,
    STARTING,
    StartupTimer,
    format_phases,
)
from app.engine.worker_loop import keep_triton_cache


def test_each_phase_lasts_until_the_next_and_news_begin_none() -> None:
    clock = StartupTimer(10.0)
    for words, now in ((LOADING_WEIGHTS, 12.0), (PROVING, 15.0), ("golden.json passed", 15.5)):
        clock.on_phase(words, now)
    seconds = clock.finish(16.0)
    assert seconds == {STARTING: 2.0, LOADING_WEIGHTS: 3.0, PROVING: 1.0}
    assert format_phases(seconds) == "6.0 s: starting 2.0, loading weights 3.0, proving 1.0"


def test_a_phase_that_comes_again_is_counted_together() -> None:
    clock = StartupTimer(0.0)
    for words, now in ((CAPTURING_GRAPHS, 1.0), (PROVING, 2.0), (CAPTURING_GRAPHS, 4.0)):
        clock.on_phase(words, now)
    assert clock.finish(7.0) == {STARTING: 1.0, CAPTURING_GRAPHS: 4.0, PROVING: 2.0}


def test_an_engine_that_names_no_phase_was_starting_all_the_time() -> None:
    assert StartupTimer(1.0).finish(4.0) == {STARTING: 3.0}


def test_phases_are_few_words_that_can_be_labels() -> None:
    assert all(phase.replace(" ", "").isalpha() and phase.islower() for phase in PHASES)


@pytest.mark.parametrize("settings", [{}, {"TRITON_CACHE_DIR": ""}])
def test_triton_keeps_its_kernels_below_ours(settings: dict[str, str], tmp_path: Path) -> None:
    environment = {**settings, "HOME": "/home/a", "XDG_CACHE_HOME": "/home/a/cache"}
    keep_triton_cache(None, environment)
    assert environment["TRITON_CACHE_DIR"] == "/home/a/cache/inkstream/triton"
    other = {**settings, "INKSTREAM_CACHE_DIR": "/kept"}
    keep_triton_cache(None, other)
    assert other["TRITON_CACHE_DIR"] == "/kept/triton"
    named_cache = {**settings, "INKSTREAM_CACHE_DIR": "/kept"}
    keep_triton_cache(tmp_path, named_cache)
    assert named_cache["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


def test_a_relative_directory_stays_the_same_wherever_a_child_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment: dict[str, str] = {}
    keep_triton_cache(Path("here"), environment)
    assert environment["TRITON_CACHE_DIR"] == str(tmp_path / "here/triton")


def test_what_a_user_has_told_triton_stays() -> None:
    environment = {"TRITON_CACHE_DIR": "/elsewhere"}
    keep_triton_cache(Path("/kept"), environment)
    assert environment == {"TRITON_CACHE_DIR": "/elsewhere"}
