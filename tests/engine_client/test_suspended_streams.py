"""Suspended streams: suspended once their buffer is full, resumed when it was read, with the same text."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.common.errors import EngineFailed, NotReady
from app.common.ipc import Cancel, Down, Submit, WorkerConfig
from app.common.types import FinishReason, PromptScores, Request, RequestStarted, SampledEvent, StepReport
from app.engine_client.client import EngineClient
from app.engine_client.engine_pool import EnginePool
from app.engine_client.fair_queue import FairQueue, QueueLimits
from app.engine_client.supervisor import EngineStopped
from app.engine_client.token_stream import MAX_BUFFERED, Cancelled, TokenStream
from app.generation.session import GenerationSession, SessionTimes, Timeouts

TOP = tuple((token, -1.0) for token in range(20))


class _Supervisor:
    """A fake engine that receives all messages and that the test drives."""

    ready: Any = object()
    is_stopped = False
    phase = "ready"

    def __init__(self) -> None:
        self.frames: list[Down] = []

    def send(self, frame: Down) -> None:
        self.frames.append(frame)


class _Harness:
    """A real client, and an engine whose tokens count up from 0 for each sequence."""

    def __init__(self, *, capacity: int = 16) -> None:
        self.client = EngineClient(WorkerConfig(weights=""))
        self.pool = EnginePool([self.client], FairQueue(QueueLimits(max_requests=capacity, max_prompt_tokens=10_000)))
        self.supervisor = _Supervisor()
        self.client.supervisor = self.supervisor  # type: ignore[assignment]
        self.client.on_ready()
        self.open: dict[str, Request] = {}
        self.written: dict[str, int] = {}
        self.submitted = 0

    def listen(self) -> None:
        """The engine reads its pipe."""
        for frame in self.supervisor.frames:
            if isinstance(frame, Submit):
                self.submitted += 1
                self.open[frame.request.id] = frame.request
                self.written[frame.request.id] = len(frame.request.generated)
                self.report(started=(RequestStarted(frame.request.id, 0),))
            elif isinstance(frame, Cancel):
                self.open.pop(frame.request_id, None)
        self.supervisor.frames.clear()

    def stop(self) -> None:
        """The engine has crashed too often."""
        self.supervisor.is_stopped = True
        self.client.on_stopped(EngineStopped("gone", 1))

    def report(self, **parts: Any) -> None:
        self.client.on_report(StepReport(at=1.0, **parts))

    def step(self, *, top: tuple[tuple[int, float], ...] = ()) -> None:
        """One token for each request, if the engine has any."""
        self.listen()
        events = []
        for name, request in list(self.open.items()):
            index = self.written[name]
            self.written[name] += 1
            finish = FinishReason.LENGTH if index + 1 == request.max_tokens else None
            events.append(SampledEvent(name, index, index, -0.5 if top else None, top, finish))
            if finish:
                del self.open[name]
        self.report(events=tuple(events))
        self.listen()

    def run(self, steps: int = 100_000, *, top: tuple[tuple[int, float], ...] = ()) -> int:
        """Step until no request is open; return the number of steps."""
        self.listen()
        for done in range(steps):
            if not self.open:
                return done
            self.step(top=top)
        return steps

    def submit(self, n: int = 1, max_tokens: int = 3 * MAX_BUFFERED, **fields: Any) -> TokenStream:
        names = [f"r{i}" for i in range(n)]
        requests = [
            Request(id=name, prompt=(1, 2, 3), max_tokens=max_tokens, leader="r0" if i else None, **fields)
            for i, name in enumerate(names)
        ]
        return self.pool.submit(requests)


def _tokens(items: list[Any], choice: int = 0) -> list[int]:
    return [a.item.token for a in items if a.choice == choice and isinstance(a.item, SampledEvent)]


async def _read_to_the_end(harness: _Harness, stream: TokenStream) -> list[Any]:
    got: list[Any] = []
    while stream.is_open or not got or stream._arrivals:
        got += await asyncio.wait_for(stream.receive(), 60)
        harness.run()
    return got


def _run(test: Any) -> None:
    asyncio.run(test)


@pytest.mark.parametrize(("n", "top"), [(1, ()), (3, ()), (16, TOP)])
def test_an_unread_stream_is_suspended_and_resumes_when_it_is_read(n: int, top: Any) -> None:
    async def check() -> None:
        harness = _Harness(capacity=n)
        stream = harness.submit(n, 900 if top else 3 * MAX_BUFFERED)
        harness.run(top=top)
        weight = sum(1 + len(a.item.top) for a in stream._arrivals if isinstance(a.item, SampledEvent))
        assert MAX_BUFFERED < weight <= MAX_BUFFERED + 1 + len(top)
        assert stream.n_suspensions == 1 and stream.is_open and not harness.open
        assert not harness.pool.queue.position("r0~2")
        got: list[Any] = []
        while stream.is_open or stream._arrivals:
            got += await asyncio.wait_for(stream.receive(), 60)
            harness.run(top=top)
        for choice in range(n):
            assert _tokens(got, choice) == list(range(900 if top else 3 * MAX_BUFFERED)), "each token once, in order"
        assert stream.n_suspensions >= 2
        assert not harness.pool._suspended and not harness.client._streams

    _run(check())


def test_a_reader_who_waits_is_never_held() -> None:
    """However much arrives before the event loop lets it run."""

    async def check() -> None:
        harness = _Harness()
        stream = harness.submit(16, 900)
        reader = asyncio.create_task(stream.receive())
        await asyncio.sleep(0)
        harness.run(top=TOP)
        assert stream.n_suspensions == 0 and not stream.is_open
        assert len(_tokens(await reader)) == 900

    _run(check())


def test_a_client_that_leaves_a_held_stream_and_comes_back_is_submitted_once() -> None:
    async def check() -> None:
        harness = _Harness()
        stream = harness.submit(3)
        harness.run()
        assert stream.n_suspensions == 1
        stream.pause()
        assert not harness.pool._suspended
        waiting = len(stream._arrivals)
        before = harness.submitted
        received = await stream.receive()
        harness.listen()
        assert len(received) == waiting and harness.submitted == before, "without a reader the stream stays suspended"
        harness.pool.resume(stream)
        harness.listen()
        assert harness.submitted == before + 3
        got = received + await _read_to_the_end(harness, stream)
        assert [_tokens(got, choice) for choice in range(3)] == [list(range(3 * MAX_BUFFERED))] * 3

    _run(check())


def test_a_stream_that_is_held_again_at_once_gets_on() -> None:
    """Suspended with a full buffer, and resumed by a client that does not read either: a token more each time."""

    async def check() -> None:
        harness = _Harness()
        stream = harness.submit()
        harness.run()
        for count in range(2, 5):
            stream.pause()
            harness.pool.resume(stream)
            assert harness.run() == 1
            assert stream.n_suspensions == count
            assert len(_tokens(stream._arrivals)) == MAX_BUFFERED + count

    _run(check())


def test_a_crash_does_not_touch_a_held_stream() -> None:
    async def check() -> None:
        harness = _Harness()
        stream = harness.submit()
        harness.run()
        for _ in range(3):
            harness.supervisor.ready = None
            assert not harness.client.on_crash()
            harness.open.clear()
            harness.supervisor.ready = object()
            harness.client.on_ready()
            harness.listen()
            assert not harness.open and harness.client.replayed == 0
        harness.supervisor.ready = None
        got = await stream.receive()
        harness.listen()
        assert not harness.open, "it waits for the engine, as all others do"
        harness.supervisor.ready = object()
        harness.client.on_ready()
        harness.listen()
        assert [request.generated[-1] for request in harness.open.values()] == [_tokens(got)[-1]]

    _run(check())


def test_held_streams_end_with_what_ends_the_others() -> None:
    async def check() -> None:
        for end, error in (
            (lambda harness, _: harness.pool.fail_all(NotReady("draining", 5)), NotReady),
            (lambda harness, _: harness.stop(), EngineFailed),
            (lambda _, stream: stream.cancel(), Cancelled),
        ):
            harness = _Harness()
            stream = harness.submit(3)
            harness.run()
            end(harness, stream)  # type: ignore[no-untyped-call]
            got = await stream.receive()
            harness.listen()
            assert [type(a.item) for a in got[-3:]] == [error] * 3
            assert not stream.is_open and not harness.open and not harness.pool._suspended

    _run(check())


def test_a_held_stream_that_is_closed_or_left_is_not_submitted_again() -> None:
    async def check() -> None:
        harness = _Harness()
        stream = harness.submit(3)
        harness.run()
        before = harness.submitted
        stream.cancel_sequence(1)
        await stream.receive()
        harness.listen()
        assert harness.submitted == before + 2
        harness.run()
        stream.close()
        await stream.receive()
        harness.listen()
        assert harness.submitted == before + 2
        assert not harness.open and not harness.pool._suspended

    _run(check())


def test_it_needs_no_room_in_a_queue_that_is_full_by_now() -> None:
    async def check() -> None:
        harness = _Harness(capacity=1)
        stream = harness.submit()
        harness.run()
        with harness.pool.queue.reserved("", 1, 1, 0.0):
            await stream.receive()
        harness.listen()
        assert list(harness.open) == ["r0~2"]
        assert stream.queue_position is None

    _run(check())


def test_unread_prompt_scores_resume_where_they_stopped() -> None:
    async def check() -> None:
        harness = _Harness()
        names = ("r0", "r1")
        prompt = tuple(range(1, 2001))
        requests = [
            Request(id=name, prompt=prompt, max_tokens=2, prompt_logprobs=None if leader else 20, leader=leader)
            for name, leader in zip(names, (None, "r0"), strict=True)
        ]
        stream = harness.pool.submit(requests)
        harness.listen()
        scores = ((-1.0, TOP),) * 100
        for start in (1, 101):
            harness.report(scores=(PromptScores("r0", start, scores),))
        harness.listen()
        assert stream.n_suspensions == 1 and not harness.open
        harness.report(scores=(PromptScores("r0", 201, scores),))  # sent before the engine received it
        assert len([a for a in await stream.receive() if isinstance(a.item, PromptScores)]) == 2
        harness.listen()
        leader, follower = harness.open.values()
        assert (leader.scored, follower.leader) == (200, "r0~2")
        assert follower.id == "r1~2"

    _run(check())


def test_the_time_a_reader_took_is_no_gap_between_tokens_and_no_turn_to_wait_for() -> None:
    async def check() -> None:
        harness = _Harness()
        stream = harness.submit()
        choice = _Silent()
        patience = Timeouts(deadline=1000, queue=0.0, heartbeat=1000)
        completion = GenerationSession(stream, [choice], patience, SessionTimes())  # type: ignore[list-item]
        harness.run()
        await completion.wait_event()
        gaps = len(completion.inter_token_latencies)
        harness.step()
        await completion.wait_event()
        assert gaps == MAX_BUFFERED
        assert len(completion.inter_token_latencies) == gaps
        assert stream.queue_position is None, "no patience of the queue ends it"

    _run(check())


class _Silent:
    """Stands for a Choice that shows nothing."""

    ended = echo = None
    n_tokens = 1

    def add(self, _event: SampledEvent) -> list[Any]:
        return []
