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

from app.common.types import FinishReason, Request, RequestStarted, SamplingParams, StepReport
from app.engine.execution.engine import Engine
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, StepResult
from app.engine.scheduling.batch_plan import Sequence as EngineSequence
from app.engine.scheduling.block_allocator import BlockAllocator
from app.engine.scheduling.block_pool import BlockPool, blocks_in_window
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from app.engine.scheduling.steps_in_flight import StepsInFlight
from tests.support.engine.delayed_runner import DelayedRunner, WatchedPool
from tests.support.engine.guessing_planner import GuessingPlanner
from tests.support.engine.scheduler_simulation import (
    EOS,
    VOCAB,
    Delivered,
    SimulatedDevice,
    Windows,
    drawn_token,
    expected_output,
)

LIMITS = StepLimits(tokens_per_step=64, max_running=8)
_MOST_GUESSES = 6


class Faulty:
    """A simulated device; rows of one request may be non-finite, and masks of guided requests are late at random."""

    def __init__(self, block_size: int, lateness: random.Random | None, windows: Windows) -> None:
        self.device = SimulatedDevice(block_size, windows)
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


class WatchedScheduler(Scheduler):
    """Counts what few blocks of a group with a window lead to."""

    def __init__(self, counts: Counter[str], limits: StepLimits, *pools: BlockPool) -> None:
        super().__init__(limits, *pools)
        self._counts = counts

    def plan(self) -> BatchPlan:
        self._counts["overdrawn"] += self._allocator.is_overdrawn
        return super().plan()

    def _add_chunk(self, sequence: EngineSequence, budget: int, chunks: list[Chunk]) -> int:
        pending, cost = sequence.num_pending, super()._add_chunk(sequence, budget, chunks)
        self._counts["cut chunks"] += cost < min(pending, budget)
        return cost


class Simulation:
    """An engine on a simulated device, and what its clients received."""

    def __init__(
        self, *requests: Request, limits: StepLimits = LIMITS, blocks: Sequence[int] = (64,), block_size: int = 4,
        is_ahead: bool = True, lateness: random.Random | None = None, windows: Windows = (None,),
        guessing: random.Random | None = None,
    ) -> None:  # fmt: skip
        """blocks: of each cache group. guessing: guesses drafts, most of them right; not for engines that are ahead."""
        self.windows = windows
        self.limits, self._size, self._is_ahead, self._lateness = limits, (blocks, block_size), is_ahead, lateness
        self._guessing = guessing
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
        """Only the clients' state survives: open requests are resubmitted from it, in order."""
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
        self._count_null_blocks()
        for plan in self.device.begun[-2:]:
            assert sum(chunk.stop - chunk.start for chunk in plan.chunks) <= self.limits.tokens_per_step
        reported = {each.request_id for each in (*report.events, *report.scores, *report.failed)}
        assert not reported & (self.left.keys() | self.failed), "the report mentions a canceled or failed request"
        assert reported <= self.started.keys(), "an event before the start was reported"
        self.failed |= {failed.request_id for failed in report.failed}
        self.delivered.take(report)
        return report

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
        self.check_the_end()

    def check_the_end(self) -> None:
        """Outputs equal those without concurrency, at most one row was wasted, and no block is in use."""
        assert not self.engine.has_work, "the schedule does not end"
        assert [(pool.active, pool.set_aside) for pool in self.engine.scheduler.pools] == [(0, 0)] * len(self.windows)
        assert set(self.started.values()) <= {1}
        for request in self.requests:
            name, expected = request.id, expected_output(request, self.windows)
            tokens, scores = self.delivered.tokens(name), self.delivered.scores[name]
            assert tokens == expected.tokens(name)[: len(tokens)]
            assert scores == expected.scores[name][: len(scores)]
            assert [event.index for event in self.delivered.events[name]] == list(range(len(tokens)))
            ends = (name in self.left, name in self.failed, name in self.delivered.finished)
            assert sum(ends) == 1, f"{name}: {ends}"
            wasted = self.device.draws[name] - len(tokens) if self._guessing is None else 0
            if name in self.delivered.finished:
                assert (tokens, scores) == (expected.tokens(name), expected.scores[name])
                finish = self.delivered.events[name][-1].finish
                assert finish is expected.events[name][-1].finish
                by_length = finish is FinishReason.LENGTH
                assert wasted <= (0 if by_length else self._is_ahead), "rows of a finished request"
            assert 0 <= wasted <= (2 if name in self.failed else 1)
            self.counts["wasted"] += wasted
            if name in self.left:
                assert not any(_has(plan, name) for plan in self.device.begun[self.left[name] :])
        self.counts["preemptions"] += self.engine.scheduler.preemptions
        self.counts["drafted"] += self.engine.scheduler.drafted
        self.counts["accepted"] += self.engine.scheduler.accepted
        self.counts["launched"] += self.device.n_launched

    def _count_null_blocks(self) -> None:
        """A sequence that decodes holds no more blocks of a group than its window covers, and two."""
        for sequence in self.engine.scheduler.running:
            for pool, blocks in zip(self.engine.scheduler.pools, sequence.blocks, strict=True):
                if pool.window is not None:
                    self.counts["null blocks"] += blocks.count(pool.null_block)
                    is_decoding = len(sequence.tokens) - sequence.num_computed == 1
                    if is_decoding and sequence.preemptions < self.limits.max_preemptions:
                        drafts = pool.needed(_MOST_GUESSES) if self._guessing else 0
                        assert len(pool.held(blocks)) <= pool.needed(pool.window) + 2 + drafts

    def _start(self) -> None:
        blocks, block_size = self._size
        sizes = zip(blocks, self.windows, strict=True)
        pools = [WatchedPool(count, block_size, window=window) for count, window in sizes]
        self.faulty = Faulty(block_size, self._lateness, self.windows)
        self.device = DelayedRunner(self.faulty, *pools)
        scheduler, ahead = WatchedScheduler(self.counts, self.limits, *pools), self.device if self._is_ahead else None
        self.engine = Engine(scheduler, self.device, ahead, masks=self.faulty if self._lateness else None)
        if self._guessing:
            assert not self._is_ahead
            scheduler.draft_planner = GuessingPlanner(self._guess)
        self.started: Counter[str] = Counter()

    def _guess(self, sequence: EngineSequence) -> list[int]:
        """The next tokens by the model's definition; the last of them may be wrong."""
        rng, known = self._guessing, {i: (i, token) for i, token in enumerate(sequence.tokens)}
        assert rng
        for position in range(len(known), len(known) + rng.randint(0, _MOST_GUESSES)):
            token = drawn_token(sequence.request, [known] * len(self.windows), position, self.windows)
            known[position] = (position, token)
        guesses = [token for _, token in known.values()][len(sequence.tokens) :]
        return [*guesses[:-1], guesses[-1] if rng.random() < 0.5 else VOCAB] if guesses else []

    def _on_started(self, started: tuple[RequestStarted, ...]) -> None:
        self.started.update(each.request_id for each in started)


def _has(plan: BatchPlan, name: str) -> bool:
    return any(chunk.sequence.request.id == name for chunk in plan.chunks)


def _raise(whether: bool) -> None:
    if whether:
        raise MemoryError


def _simulate(rng: random.Random, windows: Windows, guessing: random.Random | None = None) -> Counter[str]:
    """Simulates one random schedule with late masks, crashes, and launches that are refused or raise; counts events.

    guessing: see Simulation.
    """
    block_size, longest, running = rng.choice([1, 2, 4]), rng.randint(8, 40), rng.randint(1, 8)
    limits = StepLimits(
        tokens_per_step=running + rng.randint(0, 12),
        max_running=running,
        prompt_tokens_with_decodes=rng.choice([None, 1, 3]),
        max_preemptions=rng.choice([4, 1]) if len(windows) > 1 else 4,
    )
    requests = _random_requests(rng, longest, [rng.randrange(1, VOCAB) for _ in range(rng.randint(0, 12))])
    if rng.random() < 0.4:
        requests = [msgspec.structs.replace(request, prompt_logprobs=None) for request in requests]
    simulation = Simulation(
        limits=limits,
        blocks=_random_sizes(rng, windows, longest, block_size),
        block_size=block_size,
        is_ahead=rng.random() < 0.4 and guessing is None,
        lateness=rng if rng.random() < 0.5 else None,
        windows=windows,
        guessing=guessing,
    )
    bad, bad_from, is_raised = rng.choice(["", "", rng.choice(requests).id]), rng.randint(0, 20), rng.random() < 0.5
    trouble, crashes, todo = rng.choice([0.0, 0.0, 0.1]), rng.choice([0.0, 0.01]), requests[::-1]
    for now in range(5000):
        raises = bad if is_raised and now >= bad_from else ""
        simulation.device.refuses = lambda _plan: rng.random() < trouble
        simulation.device.before_launch = lambda plan, name=raises: _raise(_has(plan, name) or rng.random() < trouble)
        simulation.device.before_run = lambda plan, name=raises: _raise(_has(plan, name))
        simulation.faulty.bad = bad if not is_raised and now >= bad_from else ""
        while todo and rng.random() < 0.5:
            simulation.add(todo.pop())
        if rng.random() < 0.03:
            simulation.cancel(victim := rng.choice(requests).id)
            todo = [request for request in todo if request.id != victim]
        if rng.random() < crashes:
            simulation.crash()
        elif simulation.engine.has_work:
            report = simulation.step()
            assert {failed.request_id for failed in report.failed} <= {bad}
        elif not todo:
            break
    simulation.check_the_end()
    return simulation.counts


def _random_sizes(rng: random.Random, windows: Windows, longest: int, block_size: int) -> list[int]:
    """Blocks of each group: for one sequence of `longest` tokens or somewhat more, or in a window for its claim."""
    most = -(-longest // block_size) + rng.randint(0, 12)
    sizes = [most] * len(windows)
    for group, window in enumerate(windows):
        if window is not None and len(windows) > 1 and rng.random() < 0.8:
            least = min(-(-longest // block_size), blocks_in_window(window, block_size))
            sizes[group] = min(most, least + rng.choice([0, 0, 1, 3, rng.randint(0, 12)]))
    return sizes


def _simulate_many(count: int, *, seed: int = 0, windows: Windows = (None,), guesses: bool = False) -> Counter[str]:
    seeds = range(seed, seed + count)
    guessing = (random.Random(-i) if guesses else None for i in seeds)
    runs = (_simulate(random.Random(i), windows, each) for i, each in zip(seeds, guessing, strict=True))
    return sum(runs, Counter[str]())


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
    """Followers arrive after their leader; rarely with another prompt, whose state must not be reused."""
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
def test_every_schedule_gives_every_request_the_output_it_gets_alone(part: int) -> None:
    """2,400 schedules: preemption, shared prompts, forks, scores, late masks, cancellation, failures, namespaces."""
    counts = _simulate_many(600, seed=1000 * part)
    assert counts["preemptions"] > 200, "the simulation was meant to run out of blocks"
    assert counts["preempted as often as allowed"] > 0
    assert counts["launched"] > 2000, "the engine was meant to be ahead"
    assert counts["wasted"] > 20, "the simulation was meant to end sequences that are in flight"


@pytest.mark.parametrize("windows", [(9,), (None, 3), (7, None, 2), (9, 3), (None, 5, None)], ids=str)
def test_every_schedule_is_right_with_windows_and_cache_groups(windows: Windows) -> None:
    """2,000 schedules: blocks that a window has passed go to other sequences; groups have few blocks or many."""
    counts = _simulate_many(400, seed=5000, windows=windows)
    assert counts["preemptions"] > 20, "the simulation was meant to run out of blocks"
    assert counts["null blocks"] > 2000, "windows were meant to pass blocks"
    assert counts["launched"] > 300, "the engine was meant to be ahead"
    if len(windows) > 1:
        assert counts["cut chunks"] > 1000, "groups were meant to have too few blocks for a chunk"
        assert counts["overdrawn"] > 0, "shared blocks were meant to leave fewer than are set aside"
        assert counts["preempted as often as allowed"] > 10


@pytest.mark.parametrize("windows", [(None,), (9,), (None, 3), (7, None, 2), (9, 3), (None, 5, None)], ids=str)
def test_every_schedule_is_right_with_drafts(windows: Windows) -> None:
    """3,000 schedules: right drafts and wrong ones, in steps that fail, with late masks and with few blocks."""
    counts = _simulate_many(500, seed=9000, windows=windows, guesses=True)
    assert counts["preemptions"] > 20, "the simulation was meant to run out of blocks"
    assert 500 < counts["accepted"] < counts["drafted"] - 500


def _release_one_more(self: BlockAllocator, sequence: EngineSequence, position: int) -> None:
    RELEASE_BEFORE(self, sequence, position + self.pools[0].block_size)


RELEASE_BEFORE = BlockAllocator.release_before


def _take_null_blocks(self: BlockAllocator, leader: EngineSequence) -> list[list[int]]:
    return [blocks[: (leader.n_prompt - 1) // self.pools[0].block_size].tolist() for blocks in leader.blocks]


def _append_without_claim(self: BlockAllocator, sequence: EngineSequence, group: int, count: int) -> None:
    sequence.blocks[group].extend(self._allocate(group, count))


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("block_allocator.BlockAllocator.release_before", _release_one_more),
        ("block_allocator.BlockAllocator._leader_blocks", _take_null_blocks),
        ("block_allocator.find_prefix", lambda pools, hashes: [[pool.null_block] * len(hashes) for pool in pools]),
        ("block_pool.BlockPool.held", lambda _self, blocks: blocks),
        ("steps_in_flight.StepsInFlight.release", lambda self, table: self.release_now(table)),
    ],
    ids=["one block too many", "shared with a fork", "found without content", "null blocks released", "in flight"],
)
def test_simulation_detects_a_planted_bug_of_windows(
    name: str, planted: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive control."""
    monkeypatch.setattr(f"app.engine.scheduling.{name}", planted)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        _simulate_many(500, windows=(None, 3))


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("_unmet", lambda _self, _sequence, _group: 0),
        ("_append", _append_without_claim),
        ("is_overdrawn", False),
        ("_has_claim", lambda *_: True),
        ("allocate_chunk", lambda _self, _sequence, _start, stop: stop),
    ],
    ids=["nothing set aside", "set aside for ever", "no preemption for it", "admitted without it", "no blocks"],
)
def test_simulation_detects_a_planted_bug_of_claims(
    name: str, planted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive control. A ValueError: a sequence was preempted that the plan had already."""
    monkeypatch.setattr(BlockAllocator, name, planted)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        _simulate_many(700, windows=(9, 3))


def _release_and_forget(self: BlockPool, blocks: list[int]) -> None:
    for block in blocks:
        self._references[block] = 0
        self._free.append(block)


def _decodes_of_all(self: Scheduler) -> tuple[list[Chunk], list[EngineSequence]]:
    """Includes sequences that end in flight."""
    decoding = [sequence for sequence in self.running if sequence.num_pending == 1 and not sequence.waits_for_mask]
    chunks = [Chunk(sequence, sequence.num_scheduled, sequence.num_scheduled + 1) for sequence in decoding]
    return chunks, [each for each in decoding if each.capacity <= each.num_scheduled]


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("app.engine.scheduling.block_pool.BlockPool.release", _release_and_forget),
        ("app.engine.scheduling.block_allocator.chain_hash", lambda _parent, tokens: repr(tokens).encode()),
        ("tests.support.engine.scheduler_simulation.SimulatedDevice.copy", lambda _self, _pairs: None),
        (f"{StepsInFlight.__module__}.StepsInFlight.release", lambda self, table: self.release_now(table)),
        (f"{Scheduler.__module__}.Scheduler._decodes_ahead", _decodes_of_all),
    ],
    ids=["released too early", "shared with other content", "not copied", "released in flight", "launched in vain"],
)
def test_simulation_detects_a_planted_bug(
    name: str, planted: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive control."""
    monkeypatch.setattr(name, planted)
    with pytest.raises((AssertionError, KeyError)):
        _simulate_many(500)


def _request(name: str, length: int = 3, *, first: int = 1, **fields: Any) -> Request:
    return Request(id=name, prompt=tuple(range(first, first + length)), **{"max_tokens": 9, **fields})


def _choices(count: int, length: int) -> list[Request]:
    """Continuations of a prompt of `n` tokens."""
    choices = (_request(f"r/{i}", length, max_tokens=6, params=SamplingParams(seed=i)) for i in range(count))
    return [msgspec.structs.replace(request, leader="r/0" if i else None) for i, request in enumerate(choices)]


def _sizes(plan: BatchPlan) -> dict[str, int]:
    return {chunk.sequence.request.id: chunk.stop - chunk.start for chunk in plan.chunks}


def test_next_step_is_launched_before_this_one_is_collected_with_new_requests() -> None:
    simulation = Simulation(_request("a", max_tokens=4))
    assert (len(simulation.step().events), len(simulation.device.begun)) == (1, 2)
    simulation.add(_request("late", first=20, max_tokens=2))
    simulation.step()
    assert _sizes(simulation.device.begun[-1]) == {"a": 1, "late": 3}
    simulation.run()
    assert len(simulation.device.begun) == 4, "as many steps as tokens, because the last one is known"


def test_step_that_needs_the_host_runs_after_all_earlier_commits() -> None:
    simulation = Simulation(_request("a"))
    simulation.step()
    simulation.add(_request("scored", 6, max_tokens=3, prompt_logprobs=0))
    simulation.step()
    assert (len(simulation.device.begun), simulation.device.n_launched) == (2, 2), (
        "planned, and neither launched nor run"
    )
    assert simulation.step().scores
    assert (_sizes(simulation.device.begun[2]), simulation.device.n_launched) == ({"a": 1, "scored": 6}, 2)
    simulation.step()
    assert simulation.device.n_launched == 4, "one step ahead again"
    simulation.run()


def test_error_of_a_step_in_flight_blames_no_request() -> None:
    simulation = Simulation(_request("a"))
    simulation.step()
    simulation.faulty.run = lambda _plan: _raise(True)  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(MemoryError):
        simulation.step()


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("length", [1, 4, 5, 11])
def test_prompt_is_computed_once_for_all_its_choices(length: int, *, is_ahead: bool) -> None:
    """All but its last token, for which each needs its own row of logits; one step ahead, its leader skips one step."""
    simulation = Simulation(*_choices(5, length), is_ahead=is_ahead)
    simulation.run()
    assert simulation.faulty.device.prompt_tokens == length + 4
    copies = [pair for plan in simulation.device.begun for pair in plan.copies]
    assert len(copies) == (4 if (length - 1) % 4 else 0), "full blocks are shared and only the rest is copied"
    assert len({source for _, source, _ in copies}) <= 1


def test_fork_of_a_leader_during_a_write_copies_nothing() -> None:
    leader, fork = _choices(2, 10)
    simulation = Simulation(leader)
    simulation.step()
    simulation.add(fork)
    simulation.step()
    simulation.step()
    assert _sizes(simulation.device.begun[2]) == {"r/0": 1, "r/1": 2}, (
        "two full blocks are shared, the rest is computed"
    )
    simulation.faulty.bad = "r/0"
    simulation.run()
    assert simulation.failed == {"r/0"}


def test_writes_of_a_cancelled_requests_last_row_are_cleared() -> None:
    simulation = Simulation(_request("a"), _request("gone", 6, first=20), blocks=(6,))
    simulation.step()
    simulation.faulty.bad = "gone"
    simulation.cancel("gone")
    simulation.step()
    simulation.faulty.bad = ""
    simulation.add(_request("next", 14, first=40, max_tokens=2))
    simulation.run()
