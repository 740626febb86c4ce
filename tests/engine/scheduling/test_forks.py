"""Followers: the prompt is computed once and shared when ready; no follower waits for a canceled leader."""

from __future__ import annotations

import msgspec
import pytest

from app.common.types import BatchPlan, Request, SamplingParams, StepReport
from app.engine.scheduling.scheduler import Scheduler
from tests.support.engine.scheduler_simulation import Delivered, SimulatedDevice, alone, make_scheduler, step


def _choices(count: int, prompt: int, *, max_tokens: int = 6, name: str = "r") -> list[Request]:
    """n continuations of a prompt of so many tokens."""
    first = Request(id=f"{name}/0", prompt=tuple(range(1, prompt + 1)), max_tokens=max_tokens)
    return [
        first,
        *(
            msgspec.structs.replace(first, id=f"{name}/{i}", leader=first.id, params=SamplingParams(seed=i))
            for i in range(1, count)
        ),
    ]


def _steps(
    requests: list[Request], scheduler: Scheduler, device: SimulatedDevice, bad: str = ""
) -> tuple[Delivered, list[BatchPlan], list[StepReport]]:
    """All requests at once, to their end."""
    delivered, plans, reports = Delivered(requests), [], []
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        plan, report = step(scheduler, device, bad)
        delivered.take(report)
        plans.append(plan)
        reports.append(report)
    return delivered, plans, reports


def _expect_as_alone(delivered: Delivered, requests: list[Request]) -> None:
    for request in requests:
        assert delivered.tokens(request.id) == alone(request).tokens(request.id), request.id


@pytest.mark.parametrize("prompt", [1, 2, 4, 5, 8, 11])
def test_a_prompt_is_computed_once_however_many_continue_it(prompt: int) -> None:
    """But for its last token, of which each needs a row of logits of its own."""
    requests, device = _choices(5, prompt), SimulatedDevice(4)
    delivered, plans, _ = _steps(requests, make_scheduler(64, 4, 64, 8), device)
    _expect_as_alone(delivered, requests)
    assert device.prompt_tokens == prompt + 4
    assert sum(len(plan.copies) for plan in plans) == (4 if (prompt - 1) % 4 else 0)
    assert [s.cached_tokens for plan in plans for s in plan.started] == [0, *[prompt - 1] * 4]


def test_full_blocks_are_shared_and_only_the_rest_is_copied() -> None:
    requests, scheduler, device = _choices(3, 10), make_scheduler(64, 4, 64, 8), SimulatedDevice(4)
    for request in requests:
        scheduler.add(request)
    step(scheduler, device)
    plan, _ = step(scheduler, device)
    first, second, third = (scheduler.running[i].blocks for i in range(3))
    assert first[:2] == second[:2] == third[:2]
    assert len({first[2], second[2], third[2]}) == 3
    assert plan.copies == ((first[2], second[2]), (first[2], third[2]))
    assert [chunk.stop - chunk.start for chunk in plan.chunks] == [1, 1, 1]


def test_a_copy_that_is_left_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control."""
    monkeypatch.setattr(SimulatedDevice, "copy", lambda _self, _pairs: None)
    with pytest.raises((AssertionError, KeyError)):
        _steps(_choices(3, 10), make_scheduler(64, 4, 64, 8), SimulatedDevice(4))


def test_a_follower_lets_others_pass_while_its_leaders_prompt_is_computed() -> None:
    scheduler, device = make_scheduler(64, 4, 5, 4), SimulatedDevice(4)
    for request in (*_choices(3, 9), Request(id="other", prompt=(1, 2), max_tokens=1)):
        scheduler.add(request)
    plans = [step(scheduler, device)[0] for _ in range(3)]
    assert [[c.sequence.request.id for c in plan.chunks] for plan in plans] == [
        ["r/0"],
        ["r/0", "other"],
        ["r/0", "other", "r/1", "r/2"],
    ]


def test_a_leader_that_is_gone_or_another_prompts_has_no_followers() -> None:
    lead, follow = _choices(2, 10)
    other = msgspec.structs.replace(lead, prompt=tuple(range(2, 12)))
    for change in (
        {"cache_namespace": "x"},
        {"source": (1,)},
        {"prompt": other.prompt},
        {"leader": "unknown"},
        {"leader": "r/1"},
    ):
        requests = [lead, msgspec.structs.replace(follow, **change)]
        delivered, plans, _ = _steps(requests, make_scheduler(64, 4, 64, 8), SimulatedDevice(4))
        assert len(plans[0].chunks) == 2, "nothing to wait for"
        assert not any(plan.copies for plan in plans)
        _expect_as_alone(delivered, requests)


def test_who_is_to_be_scored_takes_nothing_over() -> None:
    lead, follow = _choices(2, 10)
    requests = [lead, msgspec.structs.replace(follow, prompt_logprobs=0)]
    delivered, _, _ = _steps(requests, make_scheduler(64, 4, 64, 8), SimulatedDevice(4))
    assert len(delivered.scores["r/1"]) == 9
    _expect_as_alone(delivered, requests)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_leader_that_ends_with_its_prompt_leaves_its_full_blocks_to_the_cache(max_tokens: int) -> None:
    requests, device = _choices(3, 10, max_tokens=max_tokens), SimulatedDevice(4)
    delivered, _, _ = _steps(requests, make_scheduler(64, 4, 64, 8), device)
    _expect_as_alone(delivered, requests)
    assert device.prompt_tokens == 10 + 2 * 2


@pytest.mark.parametrize("running", [True, False])
def test_followers_of_a_cancelled_leader_run_on_their_own(running: bool) -> None:
    requests, scheduler, device = _choices(3, 10), make_scheduler(64, 4, 4, 4), SimulatedDevice(4)
    for request in requests:
        scheduler.add(request)
    if running:
        assert step(scheduler, device)[0].started[0].request_id == "r/0"
    scheduler.cancel("r/0")
    delivered = Delivered(requests)
    while scheduler.has_work:
        delivered.take(step(scheduler, device)[1])
    assert not delivered.events["r/0"]
    _expect_as_alone(delivered, requests[1:])


def test_followers_of_a_leader_whose_output_is_not_finite_run_on_their_own() -> None:
    requests = _choices(3, 10)
    delivered, _, reports = _steps(requests, make_scheduler(64, 4, 64, 8), SimulatedDevice(4), bad="r/0")
    assert [f.request_id for report in reports for f in report.failed] == ["r/0"]
    _expect_as_alone(delivered, requests[1:])


def test_followers_wait_for_a_leader_that_had_to_give_way() -> None:
    """The leader is the youngest that runs, and its prompt is not done when another needs its blocks."""
    scheduler, device = make_scheduler(8, 2, 2, 2), SimulatedDevice(2)
    old, requests = Request(id="old", prompt=(7,), max_tokens=9), _choices(3, 9, max_tokens=3)
    delivered = Delivered([old, *requests])
    scheduler.add(old)
    delivered.take(step(scheduler, device)[1])
    for request in requests:
        scheduler.add(request)
    before_prompt = False
    while scheduler.has_work:
        leader = next((s for s in scheduler.running if s.request.id == "r/0"), None)
        computed = leader.num_computed if leader else 0
        delivered.take(step(scheduler, device)[1])
        if leader and leader.preemptions and computed < 9:
            before_prompt = True
    assert before_prompt, "the leader was meant to give way"
    _expect_as_alone(delivered, [old, *requests])


def test_a_follower_that_had_to_give_way_comes_back_without_its_leader() -> None:
    requests, scheduler, device = _choices(6, 7, max_tokens=20), make_scheduler(16, 2, 16, 8), SimulatedDevice(2)
    delivered, came_back = Delivered(requests), set()
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        back = [s for s in scheduler.waiting if s.preemptions]
        assert not any(s.leader for s in back)
        came_back |= {s.request.id for s in back}
        delivered.take(step(scheduler, device)[1])
    assert came_back - {"r/0"}, "the cache was meant to be too small"
    _expect_as_alone(delivered, requests)
