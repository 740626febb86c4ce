"""One poisoned request fails alone, wherever it is poisoned: the others get byte for byte what they get without it.

In the engine (this file) and over HTTP (test_r13_poison_http.py).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from app.common.fault_injection import InjectedFault
from app.common.types import Request
from app.engine.execution.engine import Engine
from app.engine.scheduling.block_allocator import BlockAllocator
from tests.support.armed_faults import arm_this_process
from tests.support.engine.mixed_requests import POISON, VICTIM, Outcome, mixed_requests, poisoned_decoder, serve
from tests.support.model.tiny_models import tiny_engine
from tests.support.promise_figures import Promise

pytestmark = pytest.mark.usefixtures("one_thread")
PLACES = {
    "prefill": ("engine.forward", {}),
    "forward in mid-text": ("engine.forward", {"after": 6}),
    "sampler": ("engine.sample", {}),
    "sampler in mid-text": ("engine.sample", {"after": 4}),
    "logprobs": ("engine.score", {}),
    "logprobs of a later piece": ("engine.score", {"after": 1}),
}


def _engine() -> Engine:
    return tiny_engine(poisoned_decoder(), blocks=400, tokens_per_step=96)


def _failed_alone(before: dict[str, Outcome], after: dict[str, Outcome], *, is_prefix: bool = True) -> bool:
    """Whether only the victim failed, once, and all others have what they had."""
    victim = after[VICTIM]
    assert len(victim.failures) == victim.ends == 1
    if is_prefix:
        assert victim.events == before[VICTIM].events[: len(victim.events)]
    return all(after[name] == before[name] for name in before if name != VICTIM)


def _with_poison(requests: list[Request], *, is_scored: bool) -> list[Request]:
    """The victim reads a token that is not finite, in the first of several pieces of its prompt."""
    changed = list(requests)
    (index,) = [index for index, request in enumerate(requests) if request.id == VICTIM]
    prompt = (*requests[index].prompt[:2], POISON, *requests[index].prompt)
    scored = 2 if is_scored else None
    changed[index] = msgspec.structs.replace(requests[index], prompt=prompt, prompt_logprobs=scored)
    return changed


def test_31_of_32_do_not_notice_a_poisoned_one(
    way: str, promise: Promise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same engine throughout: state that a victim leaks would show in the next round."""
    faults = arm_this_process(tmp_path, monkeypatch)
    good = n = 0
    engine = _engine()
    for seed in range(promise.size(2, 40)):
        requests = mixed_requests(32, seed=seed)
        before = serve(_engine(), requests)
        for point, order in PLACES.values():
            caplog.clear()
            faults.arm(point, "raise", match=f"'{VICTIM}'", **order)
            after = serve(engine, requests)
            faults.disarm(point)
            good += _failed_alone(before, after)
            n += 1
            assert caplog.text.count(f"request {VICTIM} failed") == 1 and "InjectedFault" in caplog.text
            good += serve(engine, requests) == before
            n += 1
        for is_scored in (True, False) if way != "int8" else ():  # rounding makes some number of what is none
            after = serve(engine, _with_poison(requests, is_scored=is_scored))
            assert "not finite" in after[VICTIM].failures[0]
            good += _failed_alone(before, after, is_prefix=False)
            good += serve(engine, requests) == before
            n += 2
    promise.all_of(f"rounds of 32 in the engine ({way}) in which only the poisoned one fails", good, n)


def test_without_isolation_a_poisoned_one_takes_all_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control."""
    faults = arm_this_process(tmp_path, monkeypatch)
    engine = _engine()
    engine.isolation = engine.runner  # type: ignore[assignment]
    faults.arm("engine.forward", "raise", match=VICTIM)
    with pytest.raises(InjectedFault):
        serve(engine, mixed_requests(32))


def test_blocks_that_are_not_cleared_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: what is not finite reaches those who get the victim's blocks."""
    monkeypatch.setattr(BlockAllocator, "invalidate", lambda _self, _sequence: None)
    requests = mixed_requests(32)
    engine = tiny_engine(poisoned_decoder(), blocks=60, tokens_per_step=96)
    serve(engine, _with_poison(requests, is_scored=False))
    outcomes = [outcome for _ in range(3) for outcome in serve(engine, requests).values()]
    assert any(outcome.failures for outcome in outcomes)
