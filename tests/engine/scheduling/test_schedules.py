"""The pure core by simulation: in thousands of random schedules, every request gets what it gets alone.

Some engines are one step ahead: at most one row of a request is wasted, and no block is released while a step uses it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from app.common.types import (
    BatchPlan,
    Chunk,
    FinishReason,
    Request,
    RequestStarted,
    SamplingParams,
    StepReport,
    StepResult,
)
from app.common.types import Sequence as EngineSequence
from app.engine.execution.engine import Engine
from app.engine.scheduling.block_allocator import BlockPool, StepsInFlight
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from tests.support.engine.delayed_runner import Delayed, WatchedPool
from tests.support.engine.scheduler_simulation import EOS, VOCAB, Delivered, SimulatedDevice, alone

LIMITS = StepLimits(tokens_per_step=64, max_running=8)


class Faulty:
    """A simulated device; the rows of one request can be not finite, and masks of guided requests late at random."""

    def __init__(self, block_size: int, lateness: random.Random | None = None) -> None:
        self.device = SimulatedDevice(block_size)
        self.bad = ""
        self._lateness = lateness

    def run(self, plan: BatchPlan) -> StepResult:
        if plan.chunks[0].sequence.request.id == "probe":
            return StepResult()
        assert not any(chunk.sequence.waits_for_mask for chunk in plan.chunks)
        late = frozenset(chunk.sequence.request.id for chunk in plan.chunks if self._is_late(chunk.sequence))
        return self.device.run(plan, bad=self.bad, late=late)

    def must_wait(self, sequences: Sequence[EngineSequence]) -> list[bool]:
        return [self._is_late(sequence) for sequence in sequences]

    def wait(self, seconds: float) -> None:
        """No time passes in the simulation."""

    def _is_late(self, sequence: EngineSequence) -> bool:
        return bool(sequence.request.grammar and self._lateness and self._lateness.random() < 0.2)


class World:
    """An engine on a simulated device, and what its clients have received."""

    def __init__(
        self, *requests: Request, limits: StepLimits = LIMITS, blocks: int = 64, block_size: int = 4,
        is_ahead: bool = True, lateness: random.Random | None = None,
    ) -> None:  # fmt: skip
        self.limits, self._size, self._is_ahead, self._lateness = limits, (blocks, block_size), is_ahead, lateness
        self.requests: list[Request] = []
        self.delivered = Delivered([])
        self.left: dict[str, int] = {}
        """Canceled requests, each with the number of steps started by then."""
        self.failed: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._start()
        self.add(*requests)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.requests.append(request)
            self.delivered.expect(request)
            self.engine.add(request)

    def cancel(self, name: str) -> None:
        if any(request.id == name for request in self.requests) and name not in self.delivered.finished | self.failed:
            self.left.setdefault(name, len(self.device.begun))
        self.engine.cancel(name)

    def crash(self) -> None:
        """Only what the clients have survives: open requests are resubmitted from there, in order."""
        bad = self.faulty.bad
        self._start()
        self.faulty.bad = bad
        self.left = dict.fromkeys(self.left, 0)
        for request in self.requests:
            name = request.id
            self.device.draws[name] = len(self.delivered.events[name])
            if name not in self.delivered.finished | self.failed | self.left.keys():
                tokens = tuple(token for token in self.delivered.tokens(name) if token is not None)
                scored = len(self.delivered.scores[name])
                self.engine.add(msgspec.structs.replace(request, generated=tokens, scored=scored))

    def step(self) -> StepReport:
        report = self.engine.step(self._on_started)
        scheduler = self.engine.scheduler
        assert not scheduler.violations()
        worst = max((s.preemptions for s in [*scheduler.running, *scheduler.waiting]), default=0)
        assert worst <= self.limits.max_preemptions
        self.counts["preempted as often as allowed"] += worst == self.limits.max_preemptions
        for plan in self.device.begun[-2:]:
            assert sum(chunk.stop - chunk.start for chunk in plan.chunks) <= self.limits.tokens_per_step
        reported = {each.request_id for each in (*report.events, *report.scores, *report.failed)}
        assert not reported & (self.left.keys() | self.failed), "the report mentions a canceled or failed request"
        assert reported <= self.started.keys(), "reported before its start"
        self.failed |= {failed.request_id for failed in report.failed}
        self.delivered.take(report)
        return report

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
        self.check_the_end()

    def check_the_end(self) -> None:
        """Every output is as without concurrent requests, at most one row was wasted, and no block is in use."""
        assert not self.engine.has_work, "the schedule does not come to an end"
        assert self.engine.scheduler.pool.counts.active == 0
        assert set(self.started.values()) <= {1}
        for request in self.requests:
            name, expected = request.id, alone(request)
            tokens, scores = self.delivered.tokens(name), self.delivered.scores[name]
            assert tokens == expected.tokens(name)[: len(tokens)]
            assert scores == expected.scores[name][: len(scores)]
            assert [event.index for event in self.delivered.events[name]] == list(range(len(tokens)))
            ends = (name in self.left, name in self.failed, name in self.delivered.finished)
            assert sum(ends) == 1, f"{name}: {ends}"
            wasted = self.device.draws[name] - len(tokens)
            if name in self.delivered.finished:
                assert (tokens, scores) == (expected.tokens(name), expected.scores[name])
                finish = self.delivered.events[name][-1].finish
                assert finish is expected.events[name][-1].finish
                by_length = finish is FinishReason.LENGTH
                assert wasted <= (0 if by_length else self._is_ahead), "rows of a request that has ended"
            assert 0 <= wasted <= (2 if name in self.failed else 1)
            self.counts["wasted"] += wasted
            if name in self.left:
                assert not any(_has(plan, name) for plan in self.device.begun[self.left[name] :])
        self.counts["preemptions"] += self.engine.scheduler.preemptions
        self.counts["launched"] += self.device.n_launched

    def _start(self) -> None:
        blocks, block_size = self._size
        pool = WatchedPool(blocks, block_size)
        self.faulty = Faulty(block_size, self._lateness)
        self.device = Delayed(self.faulty, pool)
        scheduler, ahead = Scheduler(self.limits, pool), self.device if self._is_ahead else None
        self.engine = Engine(scheduler, self.device, ahead, masks=self.faulty if self._lateness else None)
        self.started: Counter[str] = Counter()

    def _on_started(self, started: tuple[RequestStarted, ...]) -> None:
        self.started.update(each.request_id for each in started)


def _has(plan: BatchPlan, name: str) -> bool:
    return any(chunk.sequence.request.id == name for chunk in plan.chunks)


def _raise(whether: bool) -> None:
    if whether:
        raise MemoryError


def _simulate(rng: random.Random) -> Counter[str]:
    """One random schedule, with late masks, crashes, and launches that are refused or raise; counts what happened."""
    block_size, longest, running = rng.choice([1, 2, 4]), rng.randint(8, 40), rng.randint(1, 8)
    limits = StepLimits(
        tokens_per_step=running + rng.randint(0, 12),
        max_running=running,
        prompt_tokens_with_decodes=rng.choice([None, 1, 3]),
    )
    requests = _random_requests(rng, longest, [rng.randrange(1, VOCAB) for _ in range(rng.randint(0, 12))])
    if rng.random() < 0.4:
        requests = [msgspec.structs.replace(request, prompt_logprobs=None) for request in requests]
    world = World(
        limits=limits,
        blocks=-(-longest // block_size) + rng.randint(0, 12),
        block_size=block_size,
        is_ahead=rng.random() < 0.4,
        lateness=rng if rng.random() < 0.5 else None,
    )
    bad, bad_from, is_raised = rng.choice(["", "", rng.choice(requests).id]), rng.randint(0, 20), rng.random() < 0.5
    trouble, crashes, todo = rng.choice([0.0, 0.0, 0.1]), rng.choice([0.0, 0.01]), requests[::-1]
    for now in range(5000):
        raises = bad if is_raised and now >= bad_from else ""
        world.device.refuses = lambda _plan: rng.random() < trouble
        world.device.before_launch = lambda plan, name=raises: _raise(_has(plan, name) or rng.random() < trouble)
        world.device.before_run = lambda plan, name=raises: _raise(_has(plan, name))
        world.faulty.bad = bad if not is_raised and now >= bad_from else ""
        while todo and rng.random() < 0.5:
            world.add(todo.pop())
        if rng.random() < 0.03:
            world.cancel(victim := rng.choice(requests).id)
            todo = [request for request in todo if request.id != victim]
        if rng.random() < crashes:
            world.crash()
        elif world.engine.has_work:
            report = world.step()
            assert {failed.request_id for failed in report.failed} <= {bad}
        elif not todo:
            break
    world.check_the_end()
    return world.counts


def _simulate_many(count: int, *, seed: int = 0) -> Counter[str]:
    return sum((_simulate(random.Random(seed + i)) for i in range(count)), Counter[str]())


def _random_requests(rng: random.Random, longest: int, common: list[int]) -> list[Request]:
    """Requests of all kinds, in the order of arrival; half of them start with `common`."""
    leaders = [_random_request(rng, f"r{i}", longest, common) for i in range(rng.randint(1, 5))]
    return [request for leader in leaders for request in (leader, *_followers(rng, leader))]


def _random_request(rng: random.Random, name: str, longest: int, common: list[int]) -> Request:
    prompt = (common if rng.random() < 0.5 else []) + [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 10))]
    prompt = prompt[: longest - 1]
    return Request(
        id=name,
        prompt=tuple(prompt),
        max_tokens=rng.randint(0, longest - len(prompt)),
        stop_ids=(EOS,) if rng.random() < 0.7 else (),
        cache_namespace=rng.choice(["", "", "another key"]),
        grammar=rng.choice(["", "", "any"]),
        prompt_logprobs=rng.choice([None, 0]),
        scored=rng.choice([0, 0, rng.randint(0, len(prompt))]),
    )


def _followers(rng: random.Random, leader: Request) -> list[Request]:
    """Behind their leader in the order of arrival; rarely one of another prompt, which must not take anything over."""
    made = []
    for i in range(1, 1 + rng.choice([0, 0, 1, 2, 4])):
        changes: dict[str, Any] = {"id": f"{leader.id}/{i}", "leader": leader.id, "params": SamplingParams(seed=i)}
        if rng.random() < 0.9:
            changes["prompt_logprobs"] = None
        if rng.random() < 0.1:
            changes["cache_namespace"] = "a third key"
        if rng.random() < 0.1:
            changes["prompt"] = tuple(reversed(leader.prompt))
        made.append(msgspec.structs.replace(leader, **changes))
    return made


@pytest.mark.parametrize("part", range(4))
def test_every_schedule_gives_every_request_what_it_gets_alone(part: int) -> None:
    """2,400 schedules: preemption, shared prompts, forks, scores, late masks, cancellation, failures, namespaces."""
    counts = _simulate_many(600, seed=1000 * part)
    assert counts["preemptions"] > 200, "the simulation was meant to run out of blocks"
    assert counts["preempted as often as allowed"] > 0
    assert counts["launched"] > 2000, "the engine was meant to be ahead"
    assert counts["wasted"] > 20, "the simulation was meant to end sequences that are in flight"


def _release_and_forget(self: BlockPool, blocks: list[int]) -> None:
    for block in blocks:
        self._references[block] = 0
        self._free.append(block)


def _decodes_of_all(self: Scheduler) -> tuple[list[Chunk], list[EngineSequence]]:
    """Also of sequences that end in flight."""
    decoding = [sequence for sequence in self.running if sequence.num_pending == 1 and not sequence.waits_for_mask]
    chunks = [Chunk(sequence, sequence.num_scheduled, sequence.num_scheduled + 1) for sequence in decoding]
    return chunks, [each for each in decoding if len(each.blocks) * self.pool.block_size <= each.num_scheduled]


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("app.engine.scheduling.block_allocator.BlockPool.release", _release_and_forget),
        ("app.engine.scheduling.block_allocator.chain_hash", lambda _parent, tokens: repr(tokens).encode()),
        ("tests.support.engine.scheduler_simulation.SimulatedDevice.copy", lambda _self, _pairs: None),
        (f"{StepsInFlight.__module__}.StepsInFlight.release", lambda self, blocks: self._pool.release(blocks)),
        (f"{Scheduler.__module__}.Scheduler._decodes_ahead", _decodes_of_all),
    ],
    ids=["released too early", "shared with other content", "not copied", "released in flight", "launched in vain"],
)
def test_the_simulation_notices_a_planted_bug(
    name: str, planted: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive control."""
    monkeypatch.setattr(name, planted)
    with pytest.raises((AssertionError, KeyError)):
        _simulate_many(500)


def _request(name: str, length: int = 3, *, first: int = 1, **fields: Any) -> Request:
    return Request(id=name, prompt=tuple(range(first, first + length)), **{"max_tokens": 9, **fields})


def _choices(count: int, length: int) -> list[Request]:
    """Continuations of a prompt of so many tokens."""
    choices = (_request(f"r/{i}", length, max_tokens=6, params=SamplingParams(seed=i)) for i in range(count))
    return [msgspec.structs.replace(request, leader="r/0" if i else None) for i, request in enumerate(choices)]


def _sizes(plan: BatchPlan) -> dict[str, int]:
    return {chunk.sequence.request.id: chunk.stop - chunk.start for chunk in plan.chunks}


def test_the_next_step_is_launched_before_this_one_is_collected_with_who_came_since() -> None:
    world = World(_request("a", max_tokens=4))
    assert (len(world.step().events), len(world.device.begun)) == (1, 2)
    world.add(_request("late", first=20, max_tokens=2))
    world.step()
    assert _sizes(world.device.begun[-1]) == {"a": 1, "late": 3}
    world.run()
    assert len(world.device.begun) == 4, "as many steps as tokens: it is known which is the last"


def test_a_step_that_needs_the_host_is_run_when_all_before_it_is_committed() -> None:
    world = World(_request("a"))
    world.step()
    world.add(_request("scored", 6, max_tokens=3, prompt_logprobs=0))
    world.step()
    assert (len(world.device.begun), world.device.n_launched) == (2, 2), "planned, and neither launched nor run"
    assert world.step().scores
    assert (_sizes(world.device.begun[2]), world.device.n_launched) == ({"a": 1, "scored": 6}, 2)
    world.step()
    assert world.device.n_launched == 4, "ahead again"
    world.run()


def test_an_error_of_what_is_in_flight_blames_no_request() -> None:
    world = World(_request("a"))
    world.step()
    world.faulty.run = lambda _plan: _raise(True)  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(MemoryError):
        world.step()


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("length", [1, 4, 5, 11])
def test_a_prompt_is_computed_once_however_many_continue_it(length: int, *, is_ahead: bool) -> None:
    """But for its last token, of which each needs a row of logits of its own; ahead, its leader lets one step go."""
    world = World(*_choices(5, length), is_ahead=is_ahead)
    world.run()
    assert world.faulty.device.prompt_tokens == length + 4
    copies = [pair for plan in world.device.begun for pair in plan.copies]
    assert len(copies) == (4 if (length - 1) % 4 else 0), "full blocks are shared, and only the rest is copied"
    assert len({source for source, _ in copies}) <= 1


def test_a_fork_of_a_leader_that_writes_at_that_moment_copies_nothing() -> None:
    leader, fork = _choices(2, 10)
    world = World(leader)
    world.step()
    world.add(fork)
    world.step()
    world.step()
    assert _sizes(world.device.begun[2]) == {"r/0": 1, "r/1": 2}, "two full blocks are shared, the rest is computed"
    world.faulty.bad = "r/0"
    world.run()
    assert world.failed == {"r/0"}


def test_what_the_last_row_of_a_cancelled_request_wrote_is_cleared_for_the_next_owner() -> None:
    world = World(_request("a"), _request("gone", 6, first=20), blocks=6)
    world.step()
    world.faulty.bad = "gone"
    world.cancel("gone")
    world.step()
    world.faulty.bad = ""
    world.add(_request("next", 14, first=40, max_tokens=2))
    world.run()
