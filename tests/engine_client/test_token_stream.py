"""Suspended streams: suspended when their buffer is full, resumed when it was read, with the same output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from app.common.errors import EngineFailed, NotReady
from app.common.types import PromptScores, Request, SampledEvent, StepReport
from app.engine_client.supervisor import EngineStopped
from app.engine_client.token_stream import MAX_BUFFERED, Arrival, Cancelled, Consumer, TokenStream, Writes
from app.generation.request import Started
from app.generation.session import GenerationSession, SessionTimes, Timeouts
from tests.support.async_test import async_test
from tests.support.engine_pool import PoolHarness, Top, expected_tokens, tokens_of

TOP = tuple((token, -1.0) for token in range(20))


class _Harness(PoolHarness):
    """One engine that runs all requests at once."""

    def __init__(self, *, capacity: int = 16, top: Top = ()) -> None:
        super().__init__(1, slots=16, capacity=capacity)
        (self.engine,) = self.engines
        self.engine.top = top

    def submit_long(self, n: int = 1, max_tokens: int = 3 * MAX_BUFFERED) -> TokenStream:
        return self.submit((1, 2, 3), n, max_tokens)

    def suspended(self, n: int = 1) -> TokenStream:
        stream = self.submit_long(n)
        self.run()
        assert stream.n_suspensions == 1 and not self.engine.running
        return stream

    @property
    def n_submitted(self) -> int:
        self.run()
        return len(self.engine.seen)


class _Silent:
    """Stands in for an OutputChoice and shows nothing."""

    ended = echo = None
    n_tokens = 1
    last_token_at: float | None = None

    def add(self, _event: SampledEvent) -> list[Any]:
        return []


@pytest.mark.parametrize(("n", "top"), [(1, ()), (3, ()), (16, TOP)])
@async_test
async def test_an_unread_stream_is_suspended_and_resumes_when_it_is_read(n: int, top: Top) -> None:
    harness = _Harness(capacity=n, top=top)
    stream = harness.submit_long(n, 900 if top else 3 * MAX_BUFFERED)
    harness.run()
    weight = sum(1 + len(a.item.top) for a in stream._arrivals if isinstance(a.item, SampledEvent))
    assert MAX_BUFFERED < weight <= MAX_BUFFERED + 1 + len(top)
    assert stream.n_suspensions == 1 and stream.is_open and not harness.engine.running
    arrivals = await harness.read(stream)
    assert [tokens_of(arrivals, choice) for choice in range(n)] == [expected_tokens(stream)] * n
    assert harness.pool.n_suspensions == stream.n_suspensions >= 2
    assert not harness.pool._suspended and not harness.pool.engines[0].load


@async_test
async def test_a_stream_whose_reader_waits_is_never_suspended() -> None:
    """However many tokens arrive before the event loop runs the reader."""
    harness = _Harness(top=TOP)
    stream = harness.submit_long(16, 900)
    reader = asyncio.create_task(stream.receive())
    await asyncio.sleep(0)
    harness.run()
    assert stream.n_suspensions == 0 and not stream.is_open
    assert tokens_of(await reader) == expected_tokens(stream)


@async_test
async def test_suspended_stream_is_submitted_once_after_its_client_reconnects() -> None:
    harness = _Harness()
    stream = harness.suspended(3)
    stream.pause()
    assert not harness.pool._suspended and harness.n_submitted == 3
    arrivals = await stream.receive()
    assert harness.n_submitted == 3, "the stream must stay paused"
    harness.pool.resume(stream)
    harness.step()
    assert len(harness.engine.seen) == 3 + 3
    arrivals += await harness.read(stream)
    assert [tokens_of(arrivals, choice) for choice in range(3)] == [expected_tokens(stream)] * 3


@async_test
async def test_stream_suspended_again_at_once_makes_progress() -> None:
    """The stream resumes with a full buffer, for a client that does not read either: one more token each time."""
    harness = _Harness()
    stream = harness.suspended()
    for count in range(2, 5):
        stream.pause()
        harness.pool.resume(stream)
        harness.run()
        assert stream.n_suspensions == count
        assert len(tokens_of(stream._arrivals)) == MAX_BUFFERED + count


@async_test
async def test_crash_does_not_affect_a_suspended_stream() -> None:
    harness = _Harness()
    stream = harness.suspended()
    for _ in range(3):
        harness.engine.crash()
        harness.engine.load()
        assert harness.n_submitted == 1 and harness.pool.engines[0].replayed == 0
    harness.engine.crash()
    arrivals = await stream.receive()
    assert harness.n_submitted == 1, "it waits for the engine like all others"
    harness.engine.load()
    arrivals += await harness.read(stream)
    assert tokens_of(arrivals) == expected_tokens(stream)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda harness, _: harness.pool.fail_all(NotReady("draining", 5)), NotReady),
        (lambda harness, _: harness.engine.give_up(EngineStopped("gone", 1)), EngineFailed),
        (lambda _, stream: stream.cancel(), Cancelled),
    ],
)
@async_test
async def test_suspended_streams_end_like_the_others(
    end: Callable[[_Harness, TokenStream], None], error: type[Exception]
) -> None:
    harness = _Harness()
    stream = harness.suspended(3)
    end(harness, stream)
    arrivals = await stream.receive()
    assert [type(a.item) for a in arrivals[-3:]] == [error] * 3
    assert not stream.is_open and harness.n_submitted == 3 and not harness.pool._suspended


@async_test
async def test_cancelled_choices_are_not_submitted_again() -> None:
    harness = _Harness()
    stream = harness.suspended(3)
    stream.cancel_sequence(1)
    await stream.receive()
    assert harness.n_submitted == 3 + 2
    stream.close()
    await stream.receive()
    assert harness.n_submitted == 3 + 2
    assert not harness.engine.running and not harness.pool._suspended


@async_test
async def test_suspended_stream_resumes_into_a_full_queue() -> None:
    harness = _Harness(capacity=1)
    stream = harness.suspended()
    with harness.pool.queue.reserved("", 1, 1, 0.0):
        await stream.receive()
    harness.step()
    assert list(harness.engine.running) == ["r0/0~2"] and stream.queue_position is None


@async_test
async def test_unread_prompt_scores_resume_where_they_stopped() -> None:
    harness = _Harness()
    prompt = tuple(range(1, 2001))
    leader = Request(id="r0", prompt=prompt, max_tokens=2, prompt_logprobs=20)
    stream = harness.pool.submit([leader, Request(id="r1", prompt=prompt, max_tokens=2, leader="r0")])
    client, scores = harness.pool.engines[0], ((-1.0, TOP),) * 100
    for start in (1, 101, 201):  # the last token was sent before the engine learned of the suspension
        client.on_report(StepReport(scores=(PromptScores("r0", start, scores),)))
    assert stream.n_suspensions == 1
    assert len([a for a in await stream.receive() if isinstance(a.item, PromptScores)]) == 2
    renewed = [stream.request(name) for name in stream.open_ids]
    assert [(one.id, one.scored, one.leader) for one in renewed] == [("r0~2", 200, None), ("r1~2", 0, "r0~2")]


@async_test
async def test_time_of_a_slow_reader_counts_neither_as_token_gap_nor_as_queue_time() -> None:
    harness = _Harness()
    stream = harness.suspended()
    timeouts = Timeouts(deadline=1000, queue=0.0, heartbeat=1000)
    session = GenerationSession(stream, [_Silent()], timeouts, SessionTimes())  # type: ignore[list-item]
    await session.wait_event()
    harness.step()
    await session.wait_event()
    assert len(session.inter_token_latencies) == MAX_BUFFERED
    assert stream.queue_position is None, "no queue timeout may end it"


@async_test
async def test_consumer_takes_events_while_the_reader_sleeps() -> None:
    """The reader wakes up once per turn of the event loop, for any number of reports and sequences."""
    harness = _Harness()
    stream = harness.submit_long(3, 10)
    taken: list[list[Arrival]] = []
    reader = asyncio.create_task(stream.receive(lambda _: taken.append(stream.take()) is None and stream.is_open))
    await asyncio.sleep(0)
    for times in (1, 4, 5):
        harness.step(times)
        assert not reader.done()
        await asyncio.sleep(0)
    assert [len([a for a in each if isinstance(a.item, SampledEvent)]) for each in taken] == [3, 12, 15]
    assert await reader == [], "woken at the end with no event left"
    assert tokens_of([a for each in taken for a in each]) == expected_tokens(stream)


@async_test
async def test_exception_of_a_consumer_affects_only_its_request() -> None:
    harness = _Harness()
    broken, other = (
        GenerationSession(stream, [_Silent()], Timeouts(60.0, 60.0, 60.0), SessionTimes())  # type: ignore[list-item]
        for stream in (harness.submit_long(1, 5), harness.submit_long(1, 5))
    )

    def fail(_writes: Writes) -> bool:
        raise ArithmeticError("no text")

    reader = asyncio.create_task(broken.wait_event(fail))
    await asyncio.sleep(0)
    harness.run()
    assert tokens_of(await harness.read(other.stream)) == expected_tokens(other.stream)
    assert await reader
    assert broken.events.popleft() == Started(), "earlier events must be handled first"
    with pytest.raises(ArithmeticError):
        await broken.wait_event()


@async_test
async def test_all_streams_encode_a_step_before_any_writes_and_a_failed_write_ends_only_its_stream() -> None:
    harness, calls, written = _Harness(), list[str](), set[TokenStream]()
    broken, *others = streams = [harness.submit((1, 2, name)) for name in range(3)]

    def write(stream: TokenStream) -> None:
        calls.append("write")
        if stream is broken:
            raise RuntimeError("no place left")
        written.add(stream)

    def consumer(stream: TokenStream) -> Consumer:
        def consume(writes: Writes) -> bool:
            stream.take()
            calls.append("encode")
            writes.append((lambda _data: write(stream), b"token"))
            return stream.is_open

        return consume

    readers = [asyncio.create_task(stream.receive(consumer(stream))) for stream in streams]
    await asyncio.sleep(0)
    harness.step()
    await asyncio.sleep(0)
    assert calls[:4] == ["encode"] * 3 + ["write"]
    assert written == {*others} and not broken.is_open and all(stream.is_open for stream in others)
    for reader in readers:
        reader.cancel()
