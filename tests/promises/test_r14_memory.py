"""Out of memory in a step fails at most one request, and the outputs of all others are byte-identical."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from app.engine.execution.engine import Engine
from tests.support.armed_faults import arm_this_process
from tests.support.engine.mixed_requests import VICTIM, Outcome, mixed_requests, serve
from tests.support.model.tiny_models import tiny_decoder, tiny_engine
from tests.support.promise_figures import Promise

pytestmark = pytest.mark.usefixtures("one_thread")


def _engine() -> Engine:
    return tiny_engine(tiny_decoder(), blocks=400, tokens_per_step=96)


def _failed(before: dict[str, Outcome], after: dict[str, Outcome]) -> list[str]:
    """Names of the failed requests; checks that all other outcomes are unchanged."""
    failed = [name for name, outcome in after.items() if outcome.failures]
    assert all(after[name] == before[name] for name in before if name not in failed)
    assert all(outcome.ends == 1 for outcome in after.values())
    assert all("memory" in after[name].failures[0] for name in failed)
    return failed


@pytest.mark.parametrize("times", [1, 2])
def test_out_of_memory_at_forward_pass_k_fails_at_most_one_request(
    way: str, times: int, promise: Promise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One failure: the step is split. A second failure for a single row: that request fails."""
    faults = arm_this_process(tmp_path, monkeypatch)
    engine, requests = _engine(), mixed_requests(32)
    before, worst, tried = serve(_engine(), requests), 0, 0
    for k in range(0, 60, promise.size(5, 1)):
        faults.arm("engine.forward", "out of memory", after=k, times=times)
        failed = _failed(before, serve(engine, requests))
        if faults.is_armed("engine.forward"):  # all work finished before pass k
            faults.disarm("engine.forward")
            break
        assert len(failed) >= times - 1
        worst, tried = max(worst, len(failed)), tried + 1
    assert tried >= 3
    what = f"requests that fail when allocation fails {times} times from the k-th forward pass on ({way})"
    promise.at_most(what, worst, target=times - 1, n=tried)


def test_request_that_never_fits_fails_alone(
    way: str, promise: Promise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = arm_this_process(tmp_path, monkeypatch)
    requests = mixed_requests(32)
    before = serve(_engine(), requests)
    faults.arm("engine.forward", "out of memory", match=f"'{VICTIM}'", after=3)
    failed = _failed(before, serve(_engine(), requests))
    assert failed == [VICTIM]
    promise.at_most(f"requests of 32 that fail beside one that never fits ({way})", len(failed), target=1, n=32)


def test_out_of_memory_in_mid_step_fails_no_request(
    way: str, promise: Promise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raises torch's own error after the forward pass wrote keys and values, before sampling."""
    engine, requests, good = _engine(), mixed_requests(32), 0
    before = serve(_engine(), requests)
    executor = engine.runner.executor  # type: ignore[attr-defined]
    original = executor.logits
    calls = range(0, 40, promise.size(8, 1))
    for k in calls:
        monkeypatch.setattr(executor, "logits", _raising_out_of_memory(original, iter([False] * k + [True])))
        good += not _failed(before, serve(engine, requests))
    promise.all_of(f"rounds of 32 without a failure when allocation fails once in mid-step ({way})", good, len(calls))


def _raising_out_of_memory(original: Callable[..., Any], is_missing: Iterator[bool]) -> Callable[..., Any]:
    def logits(rows: Any) -> Any:
        if next(is_missing, False):
            raise torch.OutOfMemoryError("injected")
        return original(rows)

    return logits


def test_out_of_memory_ends_the_engine_without_isolation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control."""
    faults = arm_this_process(tmp_path, monkeypatch)
    engine = _engine()
    engine.isolation = engine.runner  # type: ignore[assignment]
    faults.arm("engine.forward", "out of memory", after=2, times=1)
    with pytest.raises(MemoryError):
        serve(engine, mixed_requests(32))
