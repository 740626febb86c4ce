"""In any order of events every request gets exactly one terminal event, and the cache blocks stay consistent.

Events: requests, forks, steps, disconnects, lack of blocks or memory, non-finite rows, engine crashes.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from app.common.types import Request, SamplingParams
from app.engine.execution.fault_isolation import FaultIsolation
from app.engine.scheduling.batch_plan import BatchPlan, Sequence, StepResult
from app.engine.scheduling.block_allocator import BlockAllocator
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from tests.engine.scheduling.test_schedules import Simulation
from tests.support.engine.scheduler_simulation import EOS, VOCAB
from tests.support.promise_figures import Promise

LONGEST = 20
EXAMPLES: list[int] = []
"""Number of steps in each example of the running test."""


class Machine(RuleBasedStateMachine):
    """A simulated engine and its clients, whose rows can raise or become non-finite."""

    def __init__(self) -> None:
        super().__init__()
        limits = StepLimits(tokens_per_step=12, max_running=6)
        self.world = Simulation(limits=limits, blocks=(16,), block_size=2, is_ahead=False)
        self.raises: set[str] = set()
        self.poisoned: set[str] = set()
        self.is_memory_short = False
        self.steps = 0
        self.world.device.runner = self

    @rule(
        prompt=st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=10),
        max_tokens=st.integers(0, LONGEST - 10),
        ends=st.booleans(),
        scored=st.booleans(),
        common=st.booleans(),
    )
    def add(self, prompt: list[int], max_tokens: int, *, ends: bool, scored: bool, common: bool) -> None:
        """Add a request; half of them share a prefix."""
        request = Request(
            id=f"r{len(self.world.requests)}",
            prompt=tuple([9, 8, 7, 6, 5, *prompt][:10] if common else prompt),
            max_tokens=max_tokens,
            stop_ids=(EOS,) if ends else (),
            prompt_logprobs=0 if scored else None,
        )
        self.world.add(request)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Add another sequence for an existing or finished prompt."""
        leader, number = self._any_request(data), len(self.world.requests)
        params = SamplingParams(seed=number)
        changes = {"id": f"r{number}", "leader": leader.id, "params": params, "prompt_logprobs": None}
        self.world.add(msgspec.structs.replace(leader, **changes))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        """Run some engine steps; these may run out of blocks."""
        for _ in range(count):
            if self.world.engine.has_work:
                self.steps += 1
                self._step()

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A client disconnects in any state of its request."""
        self.world.cancel(self._any_request(data).id)
        assert not self.world.engine.scheduler.violations()

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data(), raises=st.booleans())
    def poison(self, data: st.DataObject, *, raises: bool) -> None:
        """Make a request fail from now on: its row raises or is non-finite."""
        name = self._any_request(data).id
        self.poisoned.add(name)
        if raises:
            self.raises.add(name)
        else:
            self.world.faulty.bad = name

    @rule()
    def lack_memory(self) -> None:
        """Memory runs out for one step, but not for its rows."""
        self.is_memory_short = True

    @rule()
    def crash(self) -> None:
        """The engine crashes; only the clients' state survives."""
        self.world.crash()
        self.is_memory_short = False
        self.world.device.runner = self

    def run(self, plan: BatchPlan) -> StepResult:
        """Compute a step as the device does; a row that raises has already written."""
        names = {chunk.sequence.request.id for chunk in plan.chunks}
        if self.is_memory_short and "probe" not in names:
            self.is_memory_short = False
            raise MemoryError
        result = self.world.faulty.run(plan)
        if names & self.raises:
            raise RuntimeError("injected")
        return result

    def teardown(self) -> None:
        """Finish all work; every request must have ended once, with its reference output or a prefix of it."""
        for _ in range(2000):
            if not self.world.engine.has_work:
                break
            self._step()
        self.world.check_the_end()
        EXAMPLES.append(self.steps)

    def _any_request(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from(self.world.requests))

    def _step(self) -> None:
        for failed in self.world.step().failed:
            assert failed.request_id in self.poisoned, f"{failed} was not poisoned"


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
    assert sum(EXAMPLES) > 2 * len(EXAMPLES), "too few steps ran"
    promise.all_of("histories in which every request ends once", len(EXAMPLES), len(EXAMPLES))


def _lose_preempted_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    def preempt(self: Scheduler, sequence: Sequence) -> None:
        self._remove(sequence)
        self.preemptions += 1

    monkeypatch.setattr(Scheduler, "_preempt", preempt)


def _fail_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: FaultIsolation, plan: BatchPlan) -> StepResult:
        try:
            return self._runner.run(plan)
        except Exception:
            return StepResult(failed={chunk.sequence.request.id: "sorry" for chunk in plan.chunks})

    monkeypatch.setattr(FaultIsolation, "run", run)


def _keep_bad_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockAllocator, "invalidate", lambda _self, _sequence: None)


@pytest.mark.parametrize("bug", [_lose_preempted_sequence, _fail_whole_batch, _keep_bad_blocks])
def test_planted_bugs_are_detected(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control.

    Examples depend on the modules that are imported, since hypothesis draws constants of them. _keep_bad_blocks takes
    171 of them with few modules and 853 with all, the other bugs fewer than 100.
    """
    bug(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        _run(4000, shrinks=False)
