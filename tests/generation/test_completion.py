"""Completions: suspended when their reader is slow, resumed when it has caught up, detached, timed out, cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from app.common.errors import DeadlineExceeded, EngineFailed, NotReady, QueueTimeout
from app.common.types import PromptScores, Request, RequestStarted, SampledEvent, StepReport
from app.engine_client.open_sequences import Writes
from app.engine_client.supervisor import EngineStopped
from app.generation.collector import collect
from app.generation.completion import MAX_BUFFERED, Completion, Consumer, State, Timeouts
from app.generation.request import CompletionEvent, Delta, Finished, Heartbeat, Queued, Started
from tests.support.async_test import async_test
from tests.support.engine_pool import PoolHarness, Top, expected_tokens, take, tokens_of

TOP = tuple((token, -1.0) for token in range(20))


class _Harness(PoolHarness):
    """One engine that runs all requests at once."""

    def __init__(self, *, capacity: int = 16, top: Top = ()) -> None:
        super().__init__(1, slots=16, capacity=capacity)
        (self.engine,) = self.engines
        self.engine.top = top

    def submit_long(self, n: int = 1, max_tokens: int = 3 * MAX_BUFFERED) -> Completion:
        return self.submit((1, 2, 3), n, max_tokens)

    def suspended(self, n: int = 1) -> Completion:
        completion = self.submit_long(n)
        self.run()
        assert completion.n_suspensions == 1 and not self.engine.running
        return completion

    @property
    def n_submitted(self) -> int:
        self.run()
        return len(self.engine.seen)


def _reader(completion: Completion, events: list[CompletionEvent]) -> Consumer:
    """A reader that keeps up."""

    def consume(_writes: Writes) -> bool:
        events.extend(completion.events)
        completion.events.clear()
        return True

    return consume


@pytest.mark.parametrize(("n", "top"), [(1, ()), (3, ()), (16, TOP)])
@async_test
async def test_an_unread_completion_is_suspended_and_resumes_when_it_is_read(n: int, top: Top) -> None:
    harness = _Harness(capacity=n, top=top)
    completion = harness.submit_long(n, 900 if top else 3 * MAX_BUFFERED)
    harness.run()
    weight = sum(1 + len(event.tokens) for event in completion.events if isinstance(event, Delta))
    assert MAX_BUFFERED < weight <= MAX_BUFFERED + n * (1 + len(top)), "at most one step more"
    assert completion.n_suspensions == 1 and completion.is_open and not harness.engine.running
    assert completion.state is State.SUSPENDED
    events = harness.read(completion)
    assert [tokens_of(events, choice) for choice in range(n)] == [expected_tokens(completion)] * n
    assert harness.pool.n_suspensions == completion.n_suspensions >= 2
    assert not harness.pool._suspended and not harness.pool.engines[0].load
    assert completion.state is State.ENDED


@async_test
async def test_a_completion_whose_reader_keeps_up_is_never_suspended() -> None:
    harness, events = _Harness(top=TOP), list[CompletionEvent]()
    completion = harness.submit_long(16, 900)
    completion.read(_reader(completion, events))
    harness.run()
    assert completion.n_suspensions == 0 and not completion.is_open
    assert tokens_of(events) == expected_tokens(completion)


@pytest.mark.parametrize(("keeps_up", "n_suspensions"), [(True, 0), (False, 1)])
@async_test
async def test_a_busy_event_loop_does_not_suspend_a_reader_that_keeps_up(keeps_up: bool, n_suspensions: int) -> None:
    """More arrives than the reader takes in its time slice; only a connection that is not ready counts as slow."""
    harness = _Harness()
    completion = harness.submit_long()
    completion.read(lambda _writes: keeps_up)
    harness.step(2 * MAX_BUFFERED)
    assert completion.n_suspensions == n_suspensions


@async_test
async def test_suspended_completion_is_submitted_once_after_its_client_reconnects() -> None:
    harness = _Harness()
    completion = harness.suspended(3)
    completion.detach()
    assert not harness.pool._suspended and harness.n_submitted == 3
    events = take(completion)
    assert harness.n_submitted == 3, "it must stay detached"
    completion.attach()
    assert completion.state is State.QUEUED
    harness.step()
    assert len(harness.engine.seen) == 3 + 3
    events += harness.read(completion)
    assert [tokens_of(events, choice) for choice in range(3)] == [expected_tokens(completion)] * 3


@async_test
async def test_completion_suspended_again_at_once_makes_progress() -> None:
    """It resumes with a full buffer, for a client that does not read either: one more token each time."""
    harness = _Harness()
    completion = harness.suspended()
    for count in range(2, 5):
        completion.detach()
        completion.attach()
        harness.run()
        assert completion.n_suspensions == count
        assert len(tokens_of(completion.events)) == MAX_BUFFERED + count


@async_test
async def test_crash_does_not_affect_a_suspended_completion() -> None:
    harness = _Harness()
    completion = harness.suspended()
    for _ in range(3):
        harness.engine.crash()
        harness.engine.load()
        assert harness.n_submitted == 1 and harness.pool.engines[0].replayed == 0
    harness.engine.crash()
    events = take(completion)
    assert harness.n_submitted == 1, "it waits for the engine like all others"
    harness.engine.load()
    events += harness.read(completion)
    assert tokens_of(events) == expected_tokens(completion)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda harness, _: harness.pool.fail_all(NotReady("draining", 5)), NotReady),
        (lambda harness, _: harness.engine.give_up(EngineStopped("gone", 1)), EngineFailed),
        (lambda _, completion: completion.cancel(), None),
    ],
)
@async_test
async def test_suspended_completions_end_like_the_others(
    end: Callable[[_Harness, Completion], None], error: type[Exception] | None
) -> None:
    harness = _Harness()
    completion = harness.suspended(3)
    end(harness, completion)
    events = take(completion)
    if error:
        assert isinstance(completion.failure, error)
    else:
        assert events[-3:] == [Finished(choice, "cancelled") for choice in range(3)]
        assert not completion.cancel(), "there is nothing left to cancel"
    assert not completion.is_open and harness.n_submitted == 3 and not harness.pool._suspended


@async_test
async def test_ended_choices_are_not_submitted_again() -> None:
    harness = _Harness()
    completion = harness.suspended(3)
    completion.choices[1].add = lambda _event: _stop(completion, 1)  # type: ignore[method-assign, assignment]
    events = harness.read(completion)
    assert len(harness.engine.seen) >= 3 + 3 + 2
    assert [name for name in harness.engine.seen if name.startswith("r0/1")] == ["r0/1", "r0/1~2"]
    assert tokens_of(events, 2) == expected_tokens(completion)
    completion.end()
    assert not harness.engine.running and not harness.pool._suspended


def _stop(completion: Completion, index: int) -> list[Delta]:
    completion.choices[index].ended = Finished(index, "stop", "a stop string")
    return []


@async_test
async def test_suspended_completion_resumes_into_a_full_queue() -> None:
    harness = _Harness(capacity=1)
    completion = harness.suspended()
    with harness.pool.queue.reserved("", 1, 1, 0.0):
        take(completion)
    harness.step()
    assert list(harness.engine.running) == ["r0/0~2"] and completion.queue_position is None


@async_test
async def test_prompt_scores_continue_where_they_stopped() -> None:
    harness, scores = _Harness(), ((-1.0, TOP),) * 100
    prompt = tuple(range(1, 2001))
    leader = Request(id="r0", prompt=prompt, max_tokens=2, prompt_logprobs=20)
    completion = harness.submit_all([leader, Request(id="r1", prompt=prompt, max_tokens=2, leader="r0")])
    for start in (1, 101):
        harness.pool.engines[0].on_report(StepReport(scores=(PromptScores("r0", start, scores),)))
    completion.detach()
    # The last report was sent before the engine learned of the cancellation.
    harness.pool.engines[0].on_report(StepReport(scores=(PromptScores("r0", 201, scores),)))
    renewed = completion.renew()
    assert [(one.id, one.scored, one.leader) for one in renewed] == [("r0~2", 200, None), ("r1~2", 0, "r0~2")]


@async_test
async def test_time_of_a_slow_reader_counts_neither_as_token_gap_nor_as_queue_time() -> None:
    harness = _Harness()
    timeouts = Timeouts(deadline=1000, queue=0.05, heartbeat=1000)
    completion = harness.submit_all([Request(id="r", prompt=(1, 2), max_tokens=3 * MAX_BUFFERED)], timeouts)
    harness.run()
    assert completion.n_suspensions == 1
    await asyncio.sleep(0.1)
    take(completion)
    assert completion.queue_position is None, "no queue timeout may end it"
    harness.step()
    assert len(completion.inter_token_latencies) == MAX_BUFFERED
    assert completion.failure is None


@async_test
async def test_detached_time_counts_neither_for_timeouts_nor_for_timings() -> None:
    harness = _Harness()
    timeouts = Timeouts(deadline=1000, queue=0.2, heartbeat=1000)
    completion = harness.submit_all([Request(id="r", prompt=(1, 2), max_tokens=20)], timeouts)
    completion.detach()
    await asyncio.sleep(0.3)
    before = completion.duration
    completion.attach()
    assert completion.duration == pytest.approx(before, abs=0.1) and completion.duration < 0.2
    assert completion.queue_position == 0
    events = harness.read(completion)
    assert tokens_of(events) == expected_tokens(completion) and completion.failure is None


async def _wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come true within ten seconds")


@async_test
async def test_silence_makes_heartbeats_and_waiting_makes_queue_events() -> None:
    harness = PoolHarness(1, slots=1)
    timeouts = Timeouts(deadline=1000, queue=1000, heartbeat=0.02)
    running = harness.submit_all([Request(id="a", prompt=(1,), max_tokens=100)], timeouts)
    for name in "bc":  # the engine holds one of them in advance
        harness.submit_all([Request(id=name, prompt=(1,), max_tokens=100)], timeouts)
    events, waiting = list[CompletionEvent](), list[CompletionEvent]()
    running.read(_reader(running, events))
    harness.completions[2].read(_reader(harness.completions[2], waiting))
    harness.step()
    await _wait_for(lambda: events.count(Heartbeat()) >= 2 and len(waiting) >= 2)
    assert isinstance(events[0], Started) and set(map(type, waiting)) == {Queued}
    assert waiting[-1] == Queued(1)


@async_test
async def test_slow_reader_gets_one_heartbeat_at_most() -> None:
    harness = _Harness()
    timeouts = Timeouts(deadline=1000, queue=1000, heartbeat=0.01)
    completion = harness.submit_all([Request(id="a", prompt=(1,), max_tokens=100)], timeouts)
    fired = []
    completion.read(lambda _writes: bool(fired.append(1)))
    harness.step()
    await asyncio.sleep(0.2)
    assert completion.events.count(Heartbeat()) <= 1
    assert len(fired) < 40, "the timer must not spin while the reader is slow"


@pytest.mark.parametrize(
    ("deadline", "queue", "n_steps", "error"),
    [(0.05, 1000, 0, DeadlineExceeded), (1000, 0.05, 0, QueueTimeout), (0.05, 1000, 5, None)],
)
@async_test
async def test_timeouts_need_no_reader(
    deadline: float, queue: float, n_steps: int, error: type[Exception] | None
) -> None:
    harness = _Harness()
    timeouts = Timeouts(deadline=deadline, queue=queue, heartbeat=1000)
    completion = harness.submit_all([Request(id="a", prompt=(1,), max_tokens=100)], timeouts)
    harness.step(n_steps)
    await _wait_for(lambda: not completion.is_open)
    events = take(completion)
    assert completion.state is State.ENDED and not harness.pool.engines[0].load
    if error:
        assert isinstance(completion.failure, error)
    else:
        assert len(tokens_of(events)) == n_steps and events[-1] == Finished(0, "timeout")


@async_test
async def test_queue_timeout_does_not_end_a_running_completion() -> None:
    harness = _Harness()
    timeouts = Timeouts(deadline=1000, queue=0.02, heartbeat=1000)
    completion = harness.submit_all([Request(id="a", prompt=(1,), max_tokens=100)], timeouts)
    harness.step()
    await asyncio.sleep(0.1)
    assert completion.is_open and completion.failure is None


@async_test
async def test_consumer_is_called_once_per_turn_of_the_event_loop() -> None:
    """For any number of reports and sequences."""
    harness = _Harness()
    completion = harness.submit_long(3, 10)
    client, taken = harness.pool.engines[0], list[list[CompletionEvent]]()

    def consume(_writes: Writes) -> bool:
        taken.append(list(completion.events))
        completion.events.clear()
        return True

    harness.engine.step()  # starts all three
    completion.read(consume)
    taken.clear()
    names = list(completion.open_ids)
    for n_reports in (1, 4):
        for number in range(n_reports):
            events = tuple(SampledEvent(name, len(taken) + number + 1, 7) for name in names)
            client.on_report(StepReport(events=events))
        assert len(completion.events) == 3 * n_reports, "the consumer is not called before the loop's next turn"
        await asyncio.sleep(0)
    assert [len(each) for each in taken] == [3, 12]


@async_test
async def test_exception_of_a_choice_affects_only_its_request() -> None:
    harness = _Harness()
    broken, other = harness.submit_long(1, 5), harness.submit_long(1, 5)

    def fail(_event: SampledEvent) -> list[Any]:
        raise ArithmeticError("no text")

    broken.choices[0].add = fail  # type: ignore[method-assign]
    assert tokens_of(harness.read(other)) == expected_tokens(other)
    assert take(broken) == [Started()], "earlier events must be handled first"
    assert isinstance(broken.failure, ArithmeticError) and not broken.is_open
    with pytest.raises(ArithmeticError):
        await collect(broken)


@async_test
async def test_all_encode_a_step_before_any_writes_and_a_failed_write_ends_only_its_completion() -> None:
    harness, calls, written = _Harness(), list[str](), set[Completion]()
    broken, *others = completions = [harness.submit((1, 2, name)) for name in range(3)]

    def write(completion: Completion) -> None:
        calls.append("write")
        if completion is broken:
            raise RuntimeError("no place left")
        written.add(completion)

    def consumer(completion: Completion) -> Consumer:
        def consume(writes: Writes) -> bool:
            completion.events.clear()
            calls.append("encode")
            writes.append((lambda _data: write(completion), b"token"))
            return True

        return consume

    for completion in completions:
        completion.read(consumer(completion))
    calls.clear()
    harness.step()
    assert calls[:4] == ["encode"] * 3 + ["write"]
    assert written == {*others} and not broken.is_open and all(completion.is_open for completion in others)
    assert isinstance(broken.failure, EngineFailed)


@async_test
async def test_collected_output_has_every_choice_and_a_failure_is_raised() -> None:
    harness = _Harness(top=TOP[:2])
    completion, failing = harness.submit((1,), n=2), harness.submit((2,))
    collecting = [asyncio.create_task(collect(one)) for one in (completion, failing)]
    await asyncio.sleep(0)
    harness.step(2)
    failing.fail(EngineFailed("it broke"))
    harness.run()
    outputs = await collecting[0]
    assert [output.text for output in outputs] == ["".join(map(str, expected_tokens(completion)))] * 2
    assert [len(output.tokens) for output in outputs] == [24, 24]
    assert [output.finished for output in outputs] == [Finished(0, "length"), Finished(1, "length")]
    with pytest.raises(EngineFailed, match="it broke"):
        await collecting[1]


@async_test
async def test_late_events_of_a_released_sequence_are_dropped() -> None:
    harness = _Harness()
    completion = harness.submit((1,), max_tokens=50)
    harness.step(3)
    client, name = harness.pool.engines[0], completion.open_ids[0]
    completion.detach()
    completion.attach()
    client.on_report(StepReport(events=(SampledEvent(name, 3, 7),), started=(RequestStarted(name, 0),)))
    assert completion.state is State.QUEUED
    assert tokens_of(harness.read(completion)) == expected_tokens(completion)
