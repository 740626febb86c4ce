"""One step ahead, step by step: what is launched when, which requests are skipped, and which blocks are released."""

from __future__ import annotations

import pytest

from app.common.types import BatchPlan, Request, SamplingParams
from app.engine.scheduling.scheduler import StepLimits
from tests.support.engine.delayed_runner import engine_ahead
from tests.support.engine.in_flight_simulation import Faulty, World, has
from tests.support.engine.scheduler_simulation import alone


def _harness(*requests: Request, blocks: int = 64, running: int = 8, tokens: int = 64) -> tuple[World, Faulty]:
    """An engine that has all these requests."""
    faulty = Faulty(4)
    limits = StepLimits(tokens_per_step=tokens, max_running=running)
    engine, device = engine_ahead(faulty, limits, blocks=blocks, block_size=4)
    harness = World(engine, device)
    harness.add(*requests)
    return harness, faulty


def _request(name: str, length: int = 3, *, max_tokens: int = 9, first: int = 1, namespace: str = "") -> Request:
    return Request(
        id=name, prompt=tuple(range(first, first + length)), max_tokens=max_tokens, cache_namespace=namespace
    )


def _choices(count: int, length: int) -> list[Request]:
    """One prompt, continued so many times."""
    prompt = tuple(range(1, length + 1))
    return [
        Request(id=f"r/{i}", prompt=prompt, max_tokens=6, params=SamplingParams(seed=i), leader="r/0" if i else None)
        for i in range(count)
    ]


def _sizes(plan: BatchPlan) -> dict[str, int]:
    return {chunk.sequence.request.id: chunk.stop - chunk.start for chunk in plan.chunks}


def _raise(_plan: BatchPlan) -> None:
    raise MemoryError


def test_the_next_step_is_launched_before_this_one_is_collected() -> None:
    harness, _ = _harness(_request("a", max_tokens=4))
    reported = []
    while harness.engine.has_work:
        reported.append((len(harness.step().events), len(harness.device.begun)))
    assert reported == [(1, 2), (1, 3), (1, 4), (1, 4)], "as many steps as tokens: it is known which is the last"
    harness.check_the_end()


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_who_ends_with_its_prompt_is_not_launched_again(max_tokens: int) -> None:
    harness, _ = _harness(_request("a", 20, max_tokens=max_tokens), tokens=8)
    harness.run()
    assert [_sizes(plan) for plan in harness.device.begun] == [{"a": 8}, {"a": 8}, {"a": 4}]
    harness.check_the_end()


def test_a_stop_token_wastes_one_row_and_its_blocks_are_held_until_that_is_collected() -> None:
    text = alone(_request("a")).tokens("a")
    stop = next(token for index, token in enumerate(text) if token is not None and index and token not in text[:index])
    harness, _ = _harness(Request(id="a", prompt=(1, 2, 3), max_tokens=9, stop_ids=(stop,)))
    while "a" not in harness.delivered.finished:
        harness.step()
    assert harness.engine.has_work and not harness.engine.scheduler.running
    assert harness.engine.scheduler.pool.counts.active > 0, "the row in flight writes to them"
    report = harness.step()
    assert not (report.events or report.failed or report.scores), "the request has left"
    assert harness.device.draws["a"] == len(harness.delivered.tokens("a")) + 1
    harness.check_the_end()


def test_a_cancelled_request_is_in_no_later_launch_and_its_blocks_are_held_until_its_last_step_is_done() -> None:
    harness, _ = _harness(_request("a", 6), _request("b", 6, first=20))
    harness.step()
    assert has(harness.device.begun[-1], "a"), "it is in flight"
    harness.cancel("a")
    active = harness.engine.scheduler.pool.counts.active
    harness.step()
    assert harness.engine.scheduler.pool.counts.active < active
    harness.run()
    assert not any(has(plan, "a") for plan in harness.device.begun[2:])
    harness.check_the_end()


def test_who_comes_while_a_step_is_in_flight_is_in_the_next_launch() -> None:
    harness, _ = _harness(_request("a"))
    harness.step()
    harness.add(_request("late", first=20))
    harness.step()
    assert _sizes(harness.device.begun[-1]) == {"a": 1, "late": 3}
    harness.run()
    harness.check_the_end()


def test_where_blocks_are_short_no_request_is_preempted_before_what_is_in_flight_is_committed() -> None:
    harness, _ = _harness(_request("a", 4, max_tokens=12), _request("b", 4, first=20, max_tokens=12), blocks=5)
    harness.run()
    assert harness.engine.scheduler.preemptions > 0, "the cache was meant to be too small"
    harness.check_the_end()


def test_a_step_that_needs_the_host_is_run_when_all_before_it_is_committed() -> None:
    harness, _ = _harness(_request("a"))
    harness.step()
    harness.add(Request(id="scored", prompt=tuple(range(1, 7)), max_tokens=3, prompt_logprobs=0))
    harness.step()
    assert (len(harness.device.begun), harness.device.n_launched) == (2, 2), "planned, and neither launched nor run"
    assert harness.step().scores
    assert _sizes(harness.device.begun[2]) == {"a": 1, "scored": 6}
    assert harness.device.n_launched == 2
    harness.step()
    assert harness.device.n_launched == 4, "ahead again"
    harness.run()
    harness.check_the_end()


def test_a_launch_that_raises_loses_nothing_and_fails_no_request_that_can_be_computed() -> None:
    harness, _ = _harness(_request("a"), _request("b", 6, first=20))
    harness.step()
    harness.device.before_launch = _raise
    for _ in range(3):
        harness.step()
    harness.device.before_launch = lambda _plan: None
    harness.run()
    assert not harness.failed
    assert harness.engine.isolation.failed_launches == 2, "planned ahead, run, and planned when nothing was in flight"
    harness.check_the_end()


def test_of_a_launch_that_raises_only_the_request_at_fault_fails() -> None:
    harness, _ = _harness(_request("a"), _request("b", 6, first=20))
    harness.step()
    harness.add(_request("bad", 9, first=30))
    harness.device.before_launch = harness.device.before_run = lambda plan: _raise(plan) if has(plan, "bad") else None
    harness.run()
    assert harness.failed == {"bad"}
    harness.check_the_end()


def test_who_is_cancelled_between_planning_and_running_is_not_run_and_its_blocks_are_cleared_again() -> None:
    """Blocks with non-finite values, whose clearing was planned for the canceled request."""
    harness, faulty = _harness(_request("a"), _request("bad", 6, first=20), blocks=8)
    faulty.bad = "bad"
    harness.step()
    harness.step()
    assert harness.failed == {"bad"}
    faulty.bad = ""
    harness.device.refuses = lambda plan: has(plan, "left")
    harness.add(_request("left", 16, first=30))
    harness.step()
    assert not has(harness.device.begun[-1], "left")
    harness.cancel("left")
    harness.add(_request("next", 16, first=40))
    harness.run()
    harness.check_the_end()


def test_what_the_last_row_of_a_cancelled_request_wrote_is_cleared_for_the_next_owner() -> None:
    harness, faulty = _harness(_request("a"), _request("gone", 6, first=20), blocks=6)
    harness.step()
    faulty.bad = "gone"
    harness.cancel("gone")
    harness.step()
    faulty.bad = ""
    harness.add(_request("next", 14, first=40, max_tokens=2))
    harness.run()
    harness.check_the_end()


def test_a_prompt_is_computed_once_however_many_continue_it() -> None:
    """Its leader lets one step go, so that the forks find nothing on its way into their prompt."""
    harness, faulty = _harness(*_choices(5, 10))
    harness.run()
    assert faulty.device.prompt_tokens == 10 + 4
    assert sum(len(plan.copies) for plan in harness.device.begun) == 4
    harness.check_the_end()


def test_a_fork_of_a_leader_that_writes_at_that_moment_copies_nothing() -> None:
    leader, fork = _choices(2, 10)
    harness, faulty = _harness(leader)
    harness.step()
    harness.add(fork)
    harness.step()
    harness.step()
    assert _sizes(harness.device.begun[2]) == {"r/0": 1, "r/1": 2}, "two full blocks are shared, the rest is computed"
    faulty.bad = "r/0"
    harness.run()
    assert harness.failed == {"r/0"}
    harness.check_the_end()


def test_the_blocks_of_a_leader_that_is_cancelled_are_held_while_a_fork_copies_from_them() -> None:
    harness, _ = _harness(*_choices(2, 10))
    harness.step()
    harness.step()
    harness.cancel("r/0")
    harness.add(_request("other", 40, first=40, max_tokens=1))
    harness.run()
    assert sum(len(plan.copies) for plan in harness.device.begun) == 1
    harness.check_the_end()


def test_an_error_of_what_is_in_flight_blames_no_request() -> None:
    harness, faulty = _harness(_request("a"))
    harness.step()
    faulty.device.run = lambda _plan, **_: _raise(_plan)  # type: ignore[assignment, method-assign]
    with pytest.raises(MemoryError):
        harness.step()


def test_requests_that_take_over_what_was_generated_go_on_as_before() -> None:
    whole = alone(_request("a")).tokens("a")
    harness, _ = _harness()
    known = tuple(token for token in whole[:4] if token is not None)
    harness.add(Request(id="a", prompt=(1, 2, 3), max_tokens=9, generated=known))
    harness.run()
    assert [*known, *harness.delivered.tokens("a")] == whole
