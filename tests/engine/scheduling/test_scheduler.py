"""The pure core by simulation: thousands of random schedules, every stream equal to running alone."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from app.common.types import BatchPlan, FinishReason, Request
from app.engine.scheduling.block_allocator import BlockPool
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from tests.support.engine.scheduler_simulation import (
    VOCAB,
    Delivered,
    SimulatedDevice,
    alone,
    finish,
    make_scheduler,
    random_requests,
    step,
)


def _simulate(rng: random.Random) -> int:
    """One random schedule; returns how many preemptions it had."""
    block_size, longest = rng.choice([1, 2, 4]), rng.randint(8, 40)
    blocks = -(-longest // block_size) + rng.randint(0, 12)
    running = rng.randint(1, 8)
    prompt_tokens = rng.choice([None, 1, 3])
    scheduler = make_scheduler(blocks, block_size, running + rng.randint(0, 12), running, beside=prompt_tokens)
    device = SimulatedDevice(block_size)
    common = [rng.randrange(1, VOCAB) for _ in range(rng.randint(0, 12))]
    requests = random_requests(rng, longest, common)
    todo, delivered, cancelled = requests[::-1], Delivered(requests), set[str]()
    bad, bad_from = rng.choice(["", "", "", rng.choice(requests).id]), rng.randint(0, 20)
    for now in range(5000):
        while todo and rng.random() < 0.5:
            scheduler.add(todo.pop())
        if rng.random() < 0.03:
            victim = rng.choice(requests).id
            cancelled |= {victim} - delivered.finished
            scheduler.cancel(victim)
            todo = [r for r in todo if r.id != victim]
        if not scheduler.has_work:
            if not todo:
                break
            continue
        _, report = step(scheduler, device, bad if now >= bad_from else "", lateness=rng)
        cancelled |= {failed.request_id for failed in report.failed} & {bad}
        assert len(report.failed) <= 1
        assert not {event.request_id for event in (*report.events, *report.scores)} & cancelled
        delivered.take(report)
    else:
        raise AssertionError("the schedule does not come to an end")
    for request in requests:
        expected, tokens, scores = alone(request), delivered.tokens(request.id), delivered.scores[request.id]
        if request.id in cancelled:
            assert tokens == expected.tokens(request.id)[: len(tokens)]
            assert scores == expected.scores[request.id][: len(scores)]
        else:
            assert tokens == expected.tokens(request.id)
            assert scores == expected.scores[request.id]
            assert request.id in delivered.finished
            assert [event.index for event in delivered.events[request.id]] == list(range(len(tokens)))
    assert scheduler.pool.counts.active == 0
    assert scheduler.pool.counts.free + scheduler.pool.counts.cached == blocks
    return scheduler.preemptions


def _simulate_many(count: int, *, seed: int = 0) -> int:
    return sum(_simulate(random.Random(seed + i)) for i in range(count))


@pytest.mark.parametrize("part", range(6))
def test_every_schedule_gives_every_request_what_it_gets_alone(part: int) -> None:
    """3,000 schedules with preemption, shared prompts, forks, scores, cancellation, failures and cache namespaces."""
    assert _simulate_many(500, seed=1000 * part) > 100, "the simulation was meant to run out of blocks"


def test_the_simulation_notices_a_block_released_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control."""
    release = BlockPool.release

    def release_and_forget(self: BlockPool, blocks: list[int]) -> None:
        release(self, blocks)
        for block in blocks:
            self._references[block] = 0

    monkeypatch.setattr(BlockPool, "release", release_and_forget)
    with pytest.raises(AssertionError):
        _simulate_many(200)


def test_the_simulation_notices_a_shared_block_with_other_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: names that forget what stands before a block."""
    monkeypatch.setattr(
        "app.engine.scheduling.block_allocator.chain_hash", lambda _parent, tokens: repr(tokens).encode()
    )
    with pytest.raises(AssertionError):
        _simulate_many(500)


def test_no_request_is_preempted_more_than_four_times() -> None:
    scheduler, device = make_scheduler(20, 1, 64, 16), SimulatedDevice(1)
    for i in range(30):
        scheduler.add(Request(id=f"r{i}", prompt=(1 + i, 2), max_tokens=15))
    worst = 0
    while scheduler.has_work:
        step(scheduler, device)
        worst = max([worst, *(s.preemptions for s in [*scheduler.running, *scheduler.waiting])])
    assert scheduler.preemptions > 20
    assert worst <= 4


def test_decodes_come_first_and_prompts_fill_what_is_left() -> None:
    scheduler, device = make_scheduler(100, 4, 8, 4), SimulatedDevice(4)
    scheduler.add(Request(id="short", prompt=(1, 2), max_tokens=20))
    step(scheduler, device)
    scheduler.add(Request(id="long", prompt=tuple(range(1, 41)), max_tokens=1))
    for _ in range(5):
        plan, _ = step(scheduler, device)
        assert [(c.sequence.request.id, c.stop - c.start) for c in plan.chunks] == [("short", 1), ("long", 7)]


def test_a_step_that_others_wait_for_carries_few_prompt_tokens() -> None:
    scheduler, device = make_scheduler(64, 4, 40, 8, beside=5), SimulatedDevice(4)
    for i in range(4):
        scheduler.add(Request(id=f"decode {i}", prompt=(i, i, i), max_tokens=30))
    assert [len(step(scheduler, device)[0].chunks) for _ in range(2)] == [4, 4], "no decode waits: all prompts at once"
    scheduler.add(Request(id="prompt", prompt=tuple(range(60)), max_tokens=1))
    sizes = [_sizes(step(scheduler, device)[0]) for _ in range(2)]
    assert sizes == [[1, 1, 1, 1, 16]] * 2, "four for each decode, where that is more than five"
    for i in range(3):
        scheduler.cancel(f"decode {i}")
    assert _sizes(step(scheduler, device)[0]) == [1, 5]
    scheduler.cancel("decode 3")
    assert _sizes(step(scheduler, device)[0]) == [23], "no decode waits any more"


def _sizes(plan: BatchPlan) -> list[int]:
    return [chunk.stop - chunk.start for chunk in plan.chunks]


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    scheduler, device = make_scheduler(16, 4, 64, 4), SimulatedDevice(4)
    for name in ("first", "second"):
        scheduler.add(Request(id=name, prompt=tuple(range(1, 9)), max_tokens=1))
        plan, _ = step(scheduler, device)
    assert (plan.started[0].cached_tokens, plan.chunks[0].start) == (4, 4)


def test_another_salt_never_hits() -> None:
    scheduler, device = make_scheduler(16, 4, 64, 4), SimulatedDevice(4)
    for namespace in ("a", "b"):
        scheduler.add(Request(id=namespace, prompt=tuple(range(1, 9)), max_tokens=1, cache_namespace=namespace))
        plan, _ = step(scheduler, device)
    assert plan.started[0].cached_tokens == 0


def test_no_tokens_asked_for_ends_with_length_and_warms_the_cache() -> None:
    scheduler, device = make_scheduler(16, 4, 64, 4), SimulatedDevice(4)
    scheduler.add(Request(id="warm", prompt=tuple(range(1, 10)), max_tokens=0))
    (event,) = step(scheduler, device)[1].events
    assert (event.token, event.finish) == (None, FinishReason.LENGTH)
    assert scheduler.pool.counts.cached == 2


def test_a_row_that_is_not_finite_fails_alone_and_its_blocks_are_cleared_for_their_next_owner() -> None:
    scheduler, device = make_scheduler(16, 4, 64, 4), SimulatedDevice(4)
    for name in ("good", "bad"):
        scheduler.add(Request(id=name, prompt=tuple(range(1, 9)), max_tokens=3, cache_namespace=name))
    plan = scheduler.plan()
    (bad,) = [set(c.sequence.blocks) for c in plan.chunks if c.sequence.request.id == "bad"]
    report = finish(scheduler, device, plan, bad="bad")
    assert [f.request_id for f in report.failed] == ["bad"]
    assert [e.request_id for e in report.events] == ["good"]
    assert scheduler.pool.counts.cached == 0
    scheduler.add(Request(id="next", prompt=tuple(range(60)), max_tokens=0))
    cleared: list[int] = []
    while scheduler.has_work:
        plan, _ = step(scheduler, device)
        cleared += plan.clear
    assert len(bad) == 2
    assert sorted(cleared) == sorted(bad), "once each, when they have a new owner"


def test_who_leaves_before_a_draw_leaves_blocks_that_are_cleared() -> None:
    """The scheduler does not know yet whether what it wrote is finite."""
    scheduler, device = make_scheduler(16, 4, 8, 4), SimulatedDevice(4)
    scheduler.add(Request(id="left", prompt=tuple(range(1, 20)), max_tokens=3))
    plan, _ = step(scheduler, device)
    blocks = set(plan.chunks[0].sequence.blocks)
    scheduler.cancel("left")
    scheduler.add(Request(id="next", prompt=tuple(range(64)), max_tokens=0))
    cleared: set[int] = set()
    while scheduler.has_work:
        cleared |= set(step(scheduler, device)[0].clear)
    assert cleared == blocks


def test_a_prompt_that_is_scored_takes_half_as_many_tokens_a_step() -> None:
    """Its rows go through the head, too, and others are not to wait longer for that."""
    scheduler, device = make_scheduler(100, 4, 9, 4), SimulatedDevice(4)
    scheduler.add(Request(id="short", prompt=(1, 2), max_tokens=20))
    step(scheduler, device)
    scheduler.add(Request(id="scored", prompt=tuple(range(1, 11)), max_tokens=2, prompt_logprobs=1))
    lengths = [[c.stop - c.start for c in step(scheduler, device)[0].chunks] for _ in range(4)]
    assert lengths == [[1, 4], [1, 4], [1, 2], [1, 1]]


def _prompt(name: str, length: int, namespace: str, first: int = 1) -> Request:
    return Request(id=name, prompt=tuple(range(first, first + length)), max_tokens=1, cache_namespace=namespace)


def test_a_short_prompt_of_another_key_is_in_the_next_step_however_much_the_first_key_sends() -> None:
    scheduler, device = make_scheduler(256, 4, 16, 16), SimulatedDevice(4)
    for i in range(8):
        scheduler.add(_prompt(f"long {i}", 100, "ann"))
    for _ in range(3):
        step(scheduler, device)
    scheduler.add(_prompt("short", 3, "bob"))
    plan, report = step(scheduler, device)
    assert plan.chunks[0].sequence.request.id == "short"
    assert [event.request_id for event in report.events] == ["short"]
    assert sum(chunk.cost for chunk in plan.chunks) == 16, "the rest of the budget is not lost"


def test_keys_share_the_prompt_tokens_of_a_step_equally() -> None:
    scheduler, device = make_scheduler(256, 4, 16, 16), SimulatedDevice(4)
    scheduler.add(_prompt("ann", 200, "ann"))
    step(scheduler, device)
    scheduler.add(_prompt("bob", 200, "bob"))
    scheduler.add(_prompt("cyd", 200, "cyd"))
    plans = [step(scheduler, device)[0] for _ in range(6)]
    n_tokens = Counter[str]()
    for plan in plans[-3:]:
        n_tokens.update({chunk.sequence.request.id: chunk.cost for chunk in plan.chunks})
    assert sum(n_tokens.values()) == 48 and max(n_tokens.values()) - min(n_tokens.values()) <= 3, n_tokens


def test_one_key_alone_is_served_in_its_order() -> None:
    scheduler, device = make_scheduler(256, 4, 16, 16), SimulatedDevice(4)
    for i in range(3):
        scheduler.add(_prompt(f"{i}", 20, "ann", first=i))
    plans = [step(scheduler, device)[0] for _ in range(2)]
    assert [[(c.sequence.request.id, c.cost) for c in plan.chunks] for plan in plans] == [
        [("0", 16)],
        [("0", 4), ("1", 12)],
    ]


def test_where_keys_are_told_apart_a_step_carries_few_prompt_tokens() -> None:
    limits = StepLimits(tokens_per_step=64, max_running=8, prompt_tokens_shared=8)
    for namespace, first in (("", 40), ("ann", 8)):
        scheduler = Scheduler(limits, BlockPool(64, 4))
        scheduler.add(_prompt("x", 40, namespace))
        assert step(scheduler, SimulatedDevice(4))[0].chunks[0].cost == first
