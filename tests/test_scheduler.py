"""The pure core by simulation: thousands of random schedules, every stream equal to running alone.

The simulated device keeps (position, token) per cache slot and draws from what it reads there through the block table,
so that a block that is shared wrongly, released early or not written shows in the text.
"""

from __future__ import annotations

import hashlib
import random

import pytest

from app.engine.blocks import BlockPool
from app.engine.scheduler import Scheduler, SchedulerLimits
from app.engine.types import BatchPlan, Drawn, FinishReason, Request, Sequence, TokenEvent

VOCAB, EOS = 50, 0


class SimulatedDevice:
    """A cache of (position, token) and a model that is a hash of all it reads."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}

    def run(self, plan: BatchPlan) -> dict[str, Drawn]:
        for chunk in plan.chunks:
            for place in range(chunk.start, chunk.stop):
                self.slots[self._slot(chunk.sequence, place)] = (place, chunk.sequence.tokens[place])
        return {c.sequence.request.id: self._draw(c.sequence, c.stop) for c in plan.chunks if c.samples}

    def _slot(self, sequence: Sequence, place: int) -> tuple[int, int]:
        return sequence.blocks[place // self.block_size], place % self.block_size

    def _draw(self, sequence: Sequence, length: int) -> Drawn:
        read = [self.slots[self._slot(sequence, place)] for place in range(length)]
        assert [place for place, _ in read] == list(range(length)), "a slot holds another position"
        seen = hashlib.sha256(repr((sequence.request.params.seed, read)).encode()).digest()
        return Drawn(int.from_bytes(seen[:4], "big") % VOCAB)


def _scheduler(blocks: int, block_size: int, budget: int, running: int) -> Scheduler:
    return Scheduler(SchedulerLimits(tokens_per_step=budget, max_running=running), BlockPool(blocks, block_size))


def _alone(request: Request) -> list[int | None]:
    """What the simulated model says with all the room in the world."""
    scheduler, device = _scheduler(64, 4, 512, 1), SimulatedDevice(4)
    scheduler.add(request)
    tokens: list[int | None] = []
    while scheduler.has_work:
        plan = scheduler.plan()
        tokens += [event.token for event in scheduler.commit(plan, device.run(plan)).events]
    return tokens


def _random_request(rng: random.Random, name: str, longest: int, common: list[int]) -> Request:
    prompt = (common if rng.random() < 0.5 else []) + [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 10))]
    prompt = prompt[: longest - 1]
    return Request(
        id=name,
        prompt=tuple(prompt),
        max_tokens=rng.randint(0, longest - len(prompt)),
        stop_ids=(EOS,) if rng.random() < 0.7 else (),
        salt=rng.choice(["", "", "another key"]),
    )


def _simulate(rng: random.Random) -> int:
    """One random schedule; returns how many preemptions it had."""
    block_size, longest = rng.choice([1, 2, 4]), rng.randint(8, 40)
    blocks = -(-longest // block_size) + rng.randint(0, 12)
    running = rng.randint(1, 8)
    scheduler = _scheduler(blocks, block_size, running + rng.randint(0, 12), running)
    device = SimulatedDevice(block_size)
    common = [rng.randrange(1, VOCAB) for _ in range(rng.randint(0, 12))]
    todo = [_random_request(rng, f"r{i}", longest, common) for i in range(rng.randint(1, 10))]
    requests, got, finished = list(todo), {r.id: list[TokenEvent]() for r in todo}, set[str]()
    cancelled: set[str] = set()
    for _ in range(5000):
        while todo and rng.random() < 0.5:
            scheduler.add(todo.pop())
        if rng.random() < 0.03:
            victim = rng.choice(requests).id
            cancelled.add(victim)
            scheduler.cancel(victim)
            todo = [r for r in todo if r.id != victim]
        if not scheduler.has_work:
            if not todo:
                break
            continue
        plan = scheduler.plan()
        assert plan.chunks, "a step without progress"
        assert sum(c.stop - c.start for c in plan.chunks) <= scheduler.limits.tokens_per_step
        report = scheduler.commit(plan, device.run(plan))
        assert not scheduler.violations()
        for event in report.events:
            assert event.request_id not in finished | cancelled, "an event after the end"
            got[event.request_id].append(event)
            if event.finish:
                finished.add(event.request_id)
    else:
        raise AssertionError("the schedule does not come to an end")
    for request in requests:
        expected, tokens = _alone(request), [event.token for event in got[request.id]]
        if request.id in cancelled:
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
            assert request.id in finished
            assert [event.index for event in got[request.id]] == list(range(len(tokens)))
    assert scheduler.pool.counts.active == 0
    assert scheduler.pool.counts.free + scheduler.pool.counts.cached == blocks
    return scheduler.preemptions


def _simulate_many(count: int, *, seed: int = 0) -> int:
    return sum(_simulate(random.Random(seed + i)) for i in range(count))


@pytest.mark.parametrize("part", range(6))
def test_every_schedule_gives_every_request_what_it_gets_alone(part: int) -> None:
    """3,000 schedules with preemption, shared prompts, cancellation and salts."""
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
    monkeypatch.setattr("app.engine.scheduler.chain_hash", lambda _parent, tokens: repr(tokens).encode())
    with pytest.raises(AssertionError):
        _simulate_many(500)


def test_nobody_is_preempted_more_than_four_times() -> None:
    scheduler, device = _scheduler(20, 1, 64, 16), SimulatedDevice(1)
    for i in range(30):
        scheduler.add(Request(id=f"r{i}", prompt=(1 + i, 2), max_tokens=15))
    worst = 0
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan.chunks
        scheduler.commit(plan, device.run(plan))
        worst = max([worst, *(s.preemptions for s in [*scheduler.running, *scheduler.waiting])])
    assert scheduler.preemptions > 20
    assert worst <= 4


def test_decodes_come_first_and_prompts_fill_what_is_left() -> None:
    scheduler, device = _scheduler(100, 4, 8, 4), SimulatedDevice(4)
    scheduler.add(Request(id="short", prompt=(1, 2), max_tokens=20))
    plan = scheduler.plan()
    scheduler.commit(plan, device.run(plan))
    scheduler.add(Request(id="long", prompt=tuple(range(1, 41)), max_tokens=1))
    for _ in range(5):
        plan = scheduler.plan()
        assert [(c.sequence.request.id, c.stop - c.start) for c in plan.chunks] == [("short", 1), ("long", 7)]
        scheduler.commit(plan, device.run(plan))


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    scheduler, device = _scheduler(16, 4, 64, 4), SimulatedDevice(4)
    for name in ("first", "second"):
        scheduler.add(Request(id=name, prompt=tuple(range(1, 9)), max_tokens=1))
        plan = scheduler.plan()
        scheduler.commit(plan, device.run(plan))
    assert (plan.started[0].cached_tokens, plan.chunks[0].start) == (4, 4)


def test_another_salt_never_hits() -> None:
    scheduler, device = _scheduler(16, 4, 64, 4), SimulatedDevice(4)
    for salt in ("a", "b"):
        scheduler.add(Request(id=salt, prompt=tuple(range(1, 9)), max_tokens=1, salt=salt))
        plan = scheduler.plan()
        scheduler.commit(plan, device.run(plan))
    assert plan.started[0].cached_tokens == 0


def test_no_tokens_asked_for_ends_with_length_and_warms_the_cache() -> None:
    scheduler, device = _scheduler(16, 4, 64, 4), SimulatedDevice(4)
    scheduler.add(Request(id="warm", prompt=tuple(range(1, 10)), max_tokens=0))
    plan = scheduler.plan()
    (event,) = scheduler.commit(plan, device.run(plan)).events
    assert (event.token, event.finish) == (None, FinishReason.LENGTH)
    assert scheduler.pool.counts.cached == 2


def test_a_row_that_is_not_finite_fails_alone_and_its_blocks_are_cleared_for_their_next_owner() -> None:
    scheduler, device = _scheduler(16, 4, 64, 4), SimulatedDevice(4)
    for name in ("good", "bad"):
        scheduler.add(Request(id=name, prompt=tuple(range(1, 9)), max_tokens=3, salt=name))
    plan = scheduler.plan()
    (bad,) = [set(c.sequence.blocks) for c in plan.chunks if c.sequence.request.id == "bad"]
    report = scheduler.commit(plan, device.run(plan) | {"bad": Drawn(None)})
    assert [f.request_id for f in report.failed] == ["bad"]
    assert [e.request_id for e in report.events] == ["good"]
    assert not scheduler.violations()
    assert scheduler.pool.counts.cached == 0
    scheduler.add(Request(id="next", prompt=tuple(range(60)), max_tokens=0))
    cleared: list[int] = []
    while scheduler.has_work:
        plan = scheduler.plan()
        cleared += plan.clear
        scheduler.commit(plan, device.run(plan))
    assert len(bad) == 2
    assert sorted(cleared) == sorted(bad), "once each, when they have a new owner"
