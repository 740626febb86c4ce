"""A stream from several replicas equals that of one, however each splits it and whichever client reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.resume_store import ResumeStore
from app.cluster import failover_stream
from app.cluster.failover_stream import Divergence, FailoverStream, StreamSplicer
from app.cluster.messages import Call
from app.cluster.retry import RetryCounters, RetryingRequest
from app.http.response_cycle import BodyWriter
from app.http.sse import Event, EventParser
from tests.support.async_test import async_test
from tests.support.completion_client import joined_text, parse_events
from tests.support.scripted_replicas import (
    EVENTS,
    START,
    Lost,
    ScriptedReplicas,
    Silent,
    accepted,
    done,
    event,
    token,
    wait_until,
)

TEXT = "Once upon a time there was a king"
STARTED = (EVENTS, event("start", **START))


def output_of(splicer: StreamSplicer, *blocks: bytes) -> str:
    """The output of the splicer for these blocks."""
    return b"".join(map(splicer.take, EventParser().blocks(b"".join(blocks)))).decode()


def pieces(sequence: Any, offsets: set[int]) -> list[Any]:
    """The text or the token list, split at these offsets."""
    return [sequence[begin:end] for begin, end in pairwise([0, *sorted(offsets), len(sequence)])]


@given(
    st.lists(st.tuples(st.sets(st.integers(1, len(TEXT) - 1)), st.integers(0, 40)), min_size=1, max_size=3),
    st.sets(st.integers(1, len(TEXT) - 1)),
)
def test_spliced_output_is_complete_with_consecutive_event_ids(
    lost: list[tuple[set[int], int]], last: set[int]
) -> None:
    splicer, sent = StreamSplicer("r"), ""
    for cut, delivered in lost:
        splicer.restart()
        sent += output_of(splicer, event("start", **START), *[token(text) for text in pieces(TEXT, cut)][:delivered])
    splicer.restart()
    sent += output_of(splicer, event("start", **START), *[token(text) for text in pieces(TEXT, last)], done())
    events = parse_events(sent)
    assert joined_text(events) == TEXT
    assert [event.name for event in events if event.name != "token"] == ["start", "done"]
    assert [event.id for event in events] == [f"r:{number}" for number in range(len(events))]
    assert splicer.is_done


@given(first=st.sets(st.integers(1, 5)), second=st.sets(st.integers(1, 5)), delivered=st.integers(0, 6))
def test_each_token_detail_is_sent_once(first: set[int], second: set[int], delivered: int) -> None:
    """Includes tokens without text, such as half a character; the events of two choices alternate."""
    tokens = [{"id": number, "text": text} for number, text in enumerate(["a", "", "bc", "", "d", "e"])]

    def events(cut: set[int]) -> list[bytes]:
        return [
            event("token", index=index, text="".join(t["text"] for t in group), tokens=group)
            for group in pieces(tokens, cut)
            for index in (0, 1)
        ]

    splicer = StreamSplicer("r")
    sent = output_of(splicer, event("start", **START), *events(first)[:delivered])
    splicer.restart()
    parsed = parse_events(sent + output_of(splicer, event("start", **START), *events(second), done(0, 1)))
    for index in (0, 1):
        own = [one.data for one in parsed if one.name == "token" and one.data["index"] == index]
        assert [t for data in own for t in data["tokens"]] == tokens
        assert "".join(data["text"] for data in own) == "abcde"


@pytest.mark.parametrize(
    "again",
    [
        [event("start", **{**START, "weights_version": "other"})],
        [event("start", **{**START, "settings": {"temperature": 1}})],
        [event("start", **START), token("Once upin")],
        [event("start", **START), token("Once"), done()],
    ],
    ids=["weights", "settings", "text", "shorter"],
)
def test_divergence_between_replicas_is_detected(again: list[bytes]) -> None:
    splicer = StreamSplicer("r")
    output_of(splicer, event("start", **START), token("Once upon"))
    splicer.restart()
    with pytest.raises(Divergence):
        output_of(splicer, *again)


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_cancellation_or_timeout_may_end_the_replayed_stream_earlier(reason: str) -> None:
    splicer = StreamSplicer("r")
    output_of(splicer, event("start", **START), token("Once upon"))
    splicer.restart()
    assert output_of(splicer, event("queue", position=1, eta_ms=5)) == ": ping\n\n", "the request already runs"
    end = output_of(splicer, event("start", **START), token("On"), done(0, finish_reason=reason))
    assert '"finish_reason": "' + reason in end


def _stream_of(
    replicas: ScriptedReplicas, max_retries: int = 0, seconds: float = 60
) -> tuple[FailoverStream, RetryingRequest]:
    """A failover stream without a gateway."""
    call = Call(request_id="r", method="POST", path="/complete", query=b"", headers=(), body=b"{}")
    request = RetryingRequest(replicas, call, RetryCounters(), max_retries=max_retries, accept_timeout=60)
    return FailoverStream(request, ResumeStore(seconds), owner="o", replay_bytes=1000), request


async def _events(frames: AsyncGenerator[bytes, None], before: Sequence[bytes] = ()) -> list[Any]:
    return parse_events(b"".join([*before, *[piece async for piece in frames]]).decode())


@pytest.mark.parametrize("ending", [[token("Once upon a time"), done()], [Lost]], ids=["goes on", "is lost"])
@async_test
async def test_newer_connection_takes_a_stream_over_undisturbed_by_the_older_one(ending: list[Any]) -> None:
    late = asyncio.Event()
    again = accepted(*STARTED, token("Once upon "), token("a time"), done())
    replicas = ScriptedReplicas(accepted(*STARTED, late, *ending), again)
    stream, request = _stream_of(replicas, seconds=0)  # a stream without a reader is dropped at once
    old_frames = stream.frames(old := stream.attach(), await request.send())
    assert "event: start" in (await anext(old_frames)).decode()
    new_frames = stream.frames(new := stream.attach(), None)
    seen = [await anext(new_frames), await anext(new_frames)]
    late.set()
    assert [frame async for frame in old_frames] == []
    stream.detach(old)
    assert stream._resume_store.find("r", "o") is stream
    assert joined_text(await _events(new_frames, seen)) == "Once upon a time"
    stream.detach(new)
    assert stream._resume_store.find("r", "o") is None
    assert replicas.closed == 2


@async_test
async def test_stream_cancelled_between_replicas_ends() -> None:
    """A cancellation between two replicas: the lost one no longer has the stream, the next one has not started it."""
    late = asyncio.Event()
    replicas = ScriptedReplicas(accepted(*STARTED, Lost), accepted(late, *STARTED, token("Once"), done()))
    stream, request = _stream_of(replicas, max_retries=1)
    frames = stream.frames(stream.attach(), await request.send())
    await anext(frames)
    rest = asyncio.ensure_future(_events(frames))
    await wait_until(lambda: len(replicas.calls) == 2)
    assert stream.cancel()
    late.set()
    (end,) = await rest
    assert (end.name, end.data["error"]["code"]) == ("error", "cancelled")
    assert replicas.closed == 2


class _Writer(BodyWriter):
    """Appends to the same list as the reader of the frames."""

    def __init__(self, sent: list[bytes]) -> None:
        self._sent = sent
        self.n_written = 0

    @property
    def is_ready(self) -> bool:
        return bool(self._sent)  # as of a started response

    def write(self, body: bytes) -> None:
        self._sent.append(body)
        self.n_written += 1


@pytest.mark.parametrize("with_tokens", [False, True])
@async_test
async def test_tokens_written_directly_count_for_the_replica_that_continues(
    with_tokens: bool,
) -> None:
    def piece(text: str) -> bytes:
        return event("token", index=0, text=text, **({"tokens": [{"text": text}]} if with_tokens else {}))

    first, again = ["Once ", "upon ", "a "], ["Once ", "upon ", "a ", "time", "!"]
    replicas = ScriptedReplicas(
        accepted(*STARTED, *map(piece, first), Lost), accepted(*STARTED, *map(piece, again), done())
    )
    stream, request = _stream_of(replicas, max_retries=1)
    sent: list[bytes] = []
    writer = _Writer(sent)
    async for frame in stream.frames(subscription := stream.attach(), await request.send(), 0, writer):
        sent.append(frame)
    events = parse_events(b"".join(sent).decode())
    assert joined_text(events) == "Once upon a time!"
    assert [event.id for event in events] == [f"r:{number}" for number in range(len(events))]
    assert [event.name for event in events] == ["start", *["token"] * 5, "done"]
    assert writer.n_written == 5, "three from the first replica, two new ones from the second"
    assert b"".join(sent) == b"".join(stream._replay_buffer.since(0, 1 << 20))
    stream.detach(subscription)
    assert replicas.closed == 2


@pytest.mark.parametrize("before", [[], [token("Once ")]], ids=["before the first token", "behind a token"])
@async_test
async def test_replica_awaited_by_an_older_connection_writes_nothing_to_the_newer_one(
    before: list[bytes],
) -> None:
    late, later = asyncio.Event(), asyncio.Event()
    rest = [token("upon "), token("a "), token("time"), done()]
    replicas = ScriptedReplicas(accepted(*STARTED, *before, late, *rest), accepted(*STARTED, *before, later, *rest))
    stream, request = _stream_of(replicas, max_retries=1)

    async def read(response: Any, sent: list[bytes]) -> None:
        async for frame in stream.frames(stream.attach(), response, 0, _Writer(sent)):
            sent.append(frame)

    old, new = list[bytes](), list[bytes]()
    old_reading = asyncio.ensure_future(read(await request.send(), old))
    await wait_until(lambda: b"".join(old).count(b"event: ") == 1 + len(before))
    response = await stream.reconnect()
    new_reading = asyncio.ensure_future(read(response, new))
    await wait_until(lambda: b"".join(new).count(b"event: ") == 1 + len(before))
    late.set()
    await old_reading
    later.set()
    await new_reading
    assert joined_text(parse_events(b"".join(new).decode())) == "Once upon a time"[0 if before else 5 :]
    assert replicas.closed == 2


@async_test
async def test_stream_keeps_little_more_than_the_text_of_its_tokens() -> None:
    splicer, tokens = StreamSplicer("r"), 4000
    output_of(splicer, event("start", **START))
    largest = 0
    for number in range(tokens):
        splicer.take(event("token", index=0, text=f"{number} ", logprobs=["x" * 200])[:-2])
        largest = max(largest, sum(map(len, splicer._unparsed)))
    assert 1000 < largest < 100_000, "the stream sent 900,000 bytes"
    splicer.restart()
    assert splicer._choices[0].expected == "".join(f"{number} " for number in range(tokens))


@pytest.mark.parametrize("is_lost", [True, False], ids=["until another replica takes over", "of one that hangs"])
@async_test
async def test_comments_are_sent_while_the_replica_is_silent(monkeypatch: pytest.MonkeyPatch, is_lost: bool) -> None:
    monkeypatch.setattr(failover_stream, "_HEARTBEAT_SECONDS", 0.01)
    late = asyncio.Event()
    lost = [accepted(*STARTED, Lost), [late, *accepted(*STARTED, token("Once"), done())]]
    replicas = ScriptedReplicas(*(lost if is_lost else [accepted(*STARTED, token("Once"), late, done())]))
    stream, request = _stream_of(replicas, max_retries=1)
    frames = stream.frames(stream.attach(), await request.send())
    seen: list[bytes] = []
    while seen.count(b": ping\n\n") < 3:
        seen.append(await anext(frames))
    late.set()
    assert joined_text(await _events(frames, seen)) == "Once"


@async_test
async def test_disconnect_from_a_silent_stream_releases_its_replica() -> None:
    for turns in range(8):
        late = asyncio.Event()
        replicas = ScriptedReplicas(accepted(*STARTED, Lost), [late, *accepted(*STARTED, Silent)])
        stream, request = _stream_of(replicas, max_retries=1)
        frames = stream.frames(stream.attach(), await request.send())
        await anext(frames)
        waiting = asyncio.ensure_future(anext(frames))
        await wait_until(lambda replicas=replicas: len(replicas.calls) == 2)  # type: ignore[misc]
        late.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await frames.aclose()
        assert replicas.closed == 2, turns


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_events_parse_the_same_wherever_reads_split_them(line_end: bytes) -> None:
    wire = b": ping\n\nid: 1\nevent: a\ndata: x\n\ndata:y\ndata: z\n\n".replace(b"\n", line_end)
    for size in range(1, 40):
        parser = EventParser()
        found = [event for at in range(0, len(wire), size) for event in parser.feed(wire[at : at + size])]
        assert found == [Event("", b": ping"), Event("a", b"x", "1"), Event("message", b"y\nz")]
