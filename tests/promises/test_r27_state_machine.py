"""Whatever happens in whatever order, every request gets exactly one terminal event, and the blocks stay in order.

Requests and forks come, steps are taken, clients leave, blocks run out, rows go bad, memory is short, the engine dies.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from app.common.types import BatchPlan, Request, SamplingParams, Sequence, StepReport, StepResult
from app.engine.execution.engine import Engine, FaultIsolation
from app.engine.scheduling.block_allocator import BlockAllocator
from app.engine.scheduling.scheduler import Scheduler
from tests.support.engine.scheduler_simulation import EOS, VOCAB, Delivered, SimulatedDevice, alone, make_scheduler
from tests.support.promise_figures import Promise

LONGEST, BLOCK_SIZE, BLOCKS = 20, 2, 16
EXAMPLES: list[int] = []
"""Number of steps in each example of the running test."""


class FaultyRunner:
    """A simulated device whose rows can be made to raise, or to be not finite, and whose memory can be missing."""

    def __init__(self) -> None:
        self.device = SimulatedDevice(BLOCK_SIZE)
        self.raises: set[str] = set()
        self.spoils = ""
        self.mishaps = 0

    def run(self, plan: BatchPlan) -> StepResult:
        if plan.chunks[0].sequence.request.id == "probe":
            return StepResult()
        if self.mishaps:
            self.mishaps -= 1
            raise MemoryError
        result = self.device.run(plan, bad=self.spoils)  # what raises has written by then
        if any(chunk.sequence.request.id in self.raises for chunk in plan.chunks):
            raise RuntimeError("injected")
        return result


class Machine(RuleBasedStateMachine):
    """An engine and its clients, who know of every event they were sent."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}
        self.delivered = Delivered([])
        self.left: set[str] = set()
        self.failed: dict[str, int] = {}
        self.to_blame: set[str] = set()
        self.steps = 0
        self._start()

    @rule(
        prompt=st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=10),
        max_tokens=st.integers(0, LONGEST - 10),
        ends=st.booleans(),
        scored=st.booleans(),
        common=st.booleans(),
    )
    def add(self, prompt: list[int], max_tokens: int, *, ends: bool, scored: bool, common: bool) -> None:
        """A new request; half of them begin alike."""
        request = Request(
            id=f"r{len(self.requests)}",
            prompt=tuple([9, 8, 7, 6, 5, *prompt][:10] if common else prompt),
            max_tokens=max_tokens,
            stop_ids=(EOS,) if ends else (),
            prompt_logprobs=0 if scored else None,
        )
        self._submit(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Another text for a prompt that is there, or was."""
        leader = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        name, params = f"r{len(self.requests)}", SamplingParams(seed=len(self.requests))
        self._submit(msgspec.structs.replace(leader, id=name, leader=leader.id, params=params, prompt_logprobs=None))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        """Some steps of the engine; blocks run out by themselves."""
        for _ in range(count):
            if self.engine.has_work:
                self.steps += 1
                self._take(self.engine.step())

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A client goes, whatever state its request is in."""
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.engine.cancel(name)
        self.left |= {name} & self._open()
        self._check()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), raises=st.booleans())
    def poison(self, data: st.DataObject, *, raises: bool) -> None:
        """Makes a request fail from now on: its row raises, or is not finite."""
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.to_blame.add(name)
        if raises:
            self.runner.raises.add(name)
        else:
            self.runner.spoils = name

    @rule()
    def lack_memory(self) -> None:
        """Memory runs out for one step, but not for its rows."""
        self.runner.mishaps = 1

    @rule()
    def crash(self) -> None:
        """Only what the clients have survives: open requests are resubmitted from there, in order."""
        self._start()
        for name in [name for name in self.requests if name in self._open()]:
            tokens = tuple(token for token in self.delivered.tokens(name) if token is not None)
            scored = len(self.delivered.scores[name])
            self.engine.add(msgspec.structs.replace(self.requests[name], generated=tokens, scored=scored))

    def teardown(self) -> None:
        """All work is done, and every request has ended once, with what it gets alone or the beginning of it."""
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self._take(self.engine.step())
        assert not self._open(), "a request without an end"
        assert self.engine.scheduler.pool.counts.active == 0, "leaked blocks"
        for name, request in self.requests.items():
            expected, tokens = alone(request), self.delivered.tokens(name)
            ends = (name in self.left) + self.failed.get(name, 0) + (name in self.delivered.finished)
            assert ends == 1, f"{name} has {ends} ends"
            if name in self.delivered.finished:
                assert tokens == expected.tokens(name)
                assert self.delivered.scores[name] == expected.scores[name]
            assert tokens == expected.tokens(name)[: len(tokens)]
        EXAMPLES.append(self.steps)

    def _start(self) -> None:
        poisoned = getattr(self, "runner", FaultyRunner())
        self.runner = FaultyRunner()
        self.runner.raises, self.runner.spoils = poisoned.raises, poisoned.spoils
        self.engine = Engine(make_scheduler(BLOCKS, BLOCK_SIZE, 12, 6), self.runner)

    def _submit(self, request: Request) -> None:
        self.requests[request.id] = request
        self.delivered.events[request.id] = []
        self.delivered.scores[request.id] = []
        self.engine.add(request)

    def _open(self) -> set[str]:
        return {*self.requests} - self.left - {*self.failed} - self.delivered.finished

    def _take(self, report: StepReport) -> None:
        reported = {each.request_id for each in (*report.events, *report.scores, *report.failed)}
        assert reported <= self._open(), "the report mentions a request that has ended"
        self.delivered.take(report)
        for failed in report.failed:
            assert failed.request_id in self.to_blame, f"{failed} has done nothing"
            self.failed[failed.request_id] = self.failed.get(failed.request_id, 0) + 1
        self._check()

    def _check(self) -> None:
        assert not self.engine.scheduler.violations()
        assert all(s.preemptions <= 4 for s in self.engine.scheduler.running)


def _run(examples: int, *, shrinks: bool = True) -> None:
    EXAMPLES.clear()
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=[*HealthCheck],
        ),
    )


def test_every_request_gets_exactly_one_terminal_event_whatever_happens(promise: Promise) -> None:
    _run(promise.size(120, 5000))
    assert sum(EXAMPLES) > 2 * len(EXAMPLES), "hardly a step ran"
    promise.all_of("histories in which every request ends once", len(EXAMPLES), len(EXAMPLES))


def _lose_who_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def preempt(self: Scheduler, sequence: Sequence) -> None:
        self._remove(sequence)
        self.preemptions += 1

    monkeypatch.setattr(Scheduler, "_preempt", preempt)


def _blame_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: FaultIsolation, plan: BatchPlan) -> StepResult:
        try:
            return self._runner.run(plan)
        except Exception:
            return StepResult(failed={chunk.sequence.request.id: "sorry" for chunk in plan.chunks})

    monkeypatch.setattr(FaultIsolation, "run", run)


def _keep_bad_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockAllocator, "invalidate", lambda _self, _sequence: None)


@pytest.mark.parametrize("bug", [_lose_who_gives_way, _blame_everybody, _keep_bad_blocks])
def test_a_planted_bug_is_found(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control."""
    bug(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        _run(300, shrinks=False)
