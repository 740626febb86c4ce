"""What an engine reports while it starts, and its errors when memory is missing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from app.common.ipc import WorkerConfig
from app.common.startup_timer import LOADING_WEIGHTS, PHASES, PROVING, WARMING_UP
from app.engine.backends import TorchBackend
from app.engine.startup import build_engine
from app.engine.worker_loop import EngineStartError
from tests.engine.memory.test_device_errors import accelerator_error
from tests.support.model.tiny_models import tiny_weights


def _config(directory: Path, **changes: Any) -> WorkerConfig:
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kernels": "torch", "max_running": 2}
    return WorkerConfig(weights=str(tiny_weights(directory)), **{**given, "tokens_per_step": 16, **changes})


def test_the_phases_are_told_in_their_order_and_where_the_memory_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    phases: list[str] = []
    with caplog.at_level(logging.INFO, "inkstream"):
        ready = build_engine(_config(tmp_path, replica=1, replicas=2), phases.append).ready
    assert [words for words in phases if words in PHASES] == [LOADING_WEIGHTS, WARMING_UP, PROVING]
    lines = [record.getMessage().split() for record in caplog.records if "memory:" in record.getMessage()]
    assert [line[:4] for line in lines][1:] == [
        ["engine", "1:", "memory:", name] for name in ("weights", "activations", "cache")
    ]
    assert ready.blocks_total > 0


def _lacks(*_given: object, **_named: object) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def _breaks_off(*_given: object, **_named: object) -> Any:
    """As a capture does in which memory is missing."""
    try:
        _lacks()
    finally:
        raise accelerator_error(901, "operation failed due to a previous error during capture")


def _ends_a_capture(*_given: object, **_named: object) -> Any:
    raise accelerator_error(901, "operation failed due to a previous error during capture")


def _fails_otherwise(*_given: object, **_named: object) -> Any:
    raise accelerator_error(700, "an illegal memory access was encountered")


def test_weights_that_find_no_memory_are_a_matter_of_configuration(tmp_path: Path) -> None:
    """It would be missing again and again: no crash that another start could mend."""
    with pytest.raises(EngineStartError, match="the weights do not fit"):
        build_engine(_config(tmp_path), read=_lacks)


@pytest.mark.parametrize("lacks", [_lacks, _breaks_off])
def test_a_start_that_finds_no_memory_beside_the_cache_says_which_number_to_change(
    lacks: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchBackend, "start", lacks)
    for changes, flag in (({}, "--gpu-memory-utilization"), ({"kv_blocks": 32}, "--kv-blocks")):
        with pytest.raises(
            EngineStartError, match=rf"a cache of \d+ blocks .* give a smaller {flag} or --max-running$"
        ):
            build_engine(_config(tmp_path, **changes))


def test_a_capture_that_breaks_off_is_refused_with_all_that_may_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other start would end there, too."""
    monkeypatch.setattr(TorchBackend, "start", _ends_a_capture)
    with pytest.raises(EngineStartError, match=r"--max-running; or --kernels torch, .* during capture\)$"):
        build_engine(_config(tmp_path))


def test_a_start_that_fails_otherwise_is_not_called_a_want_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchBackend, "start", _fails_otherwise)
    with pytest.raises(torch.AcceleratorError, match="illegal memory"):
        build_engine(_config(tmp_path))
