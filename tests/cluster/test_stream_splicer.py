"""The stream splicer: a stream that two replicas produced equals the text of one, however each splits it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.cluster.failover_stream import Divergence, StreamSplicer
from app.http.sse import Event, EventParser
from tests.support.completion_client import parse_events, text_of
from tests.support.scripted_replicas import START, done, event, token

TEXT = "Once upon a time there was a king"


def frames(*blocks: bytes) -> list[Event]:
    """As a replica sends them."""
    return EventParser().feed(b"".join(blocks))


def output_of(splicer: StreamSplicer, *blocks: bytes) -> str:
    """What the client gets of all this."""
    return b"".join(splicer.take(frame) for frame in frames(*blocks)).decode()


def pieces(text: str, offsets: set[int]) -> list[str]:
    """The text, cut at these offsets."""
    ends = [0, *sorted(offsets), len(text)]
    return [text[begin:end] for begin, end in pairwise(ends)]


cuts = st.sets(st.integers(1, len(TEXT) - 1))


@given(first=cuts, second=cuts, delivered=st.integers(0, 40))
def test_the_text_is_whole_and_its_events_are_numbered_without_a_gap(
    first: set[int], second: set[int], delivered: int
) -> None:
    splicer = StreamSplicer("r")
    before = [token(text) for text in pieces(TEXT, first)][:delivered]
    sent = output_of(splicer, event("start", **START), *before)
    splicer.restart()
    sent += output_of(splicer, event("start", **START), *[token(text) for text in pieces(TEXT, second)], done())
    events = parse_events(sent)
    assert text_of(events) == TEXT
    assert [event.name for event in events if event.name != "token"] == ["start", "done"]
    assert [event.id for event in events] == [f"r:{number}" for number in range(len(events))]
    assert splicer.is_done


@given(first=cuts, second=cuts, third=cuts)
def test_a_stream_may_lose_its_replica_twice(first: set[int], second: set[int], third: set[int]) -> None:
    splicer, sent = StreamSplicer("r"), ""
    for cut, share in ((first, 2), (second, 1), (third, 0)):
        texts = pieces(TEXT, cut)
        splicer.restart()
        sent += output_of(splicer, event("start", **START), *[token(text) for text in texts[: len(texts) - share]])
    assert text_of(parse_events(sent)) == TEXT


def test_choices_are_told_apart() -> None:
    splicer = StreamSplicer("r")
    sent = output_of(splicer, event("start", **START), token("ab", 0), token("xyz", 1), token("c", 0))
    splicer.restart()
    sent += output_of(splicer, event("start", **START), token("x", 1), token("abcd", 0), token("yzw", 1), done(0, 1))
    texts = dict.fromkeys((0, 1), "")
    for one in parse_events(sent):
        if one.name == "token":
            texts[one.data["index"]] += one.data["text"]
    assert texts == {0: "abcd", 1: "xyzw"}


@given(first=st.sets(st.integers(1, 5)), second=st.sets(st.integers(1, 5)), delivered=st.integers(0, 6))
def test_each_token_is_told_once_where_tokens_are_told(first: set[int], second: set[int], delivered: int) -> None:
    """Also tokens without a text of their own, such as half a character."""
    tokens = [{"id": number, "text": text} for number, text in enumerate(["a", "", "bc", "", "d", "e"])]

    def events(cut: set[int]) -> list[bytes]:
        ends = [0, *sorted(cut), len(tokens)]
        groups = [tokens[begin:end] for begin, end in pairwise(ends)]
        return [event("token", index=0, text="".join(t["text"] for t in group), tokens=group) for group in groups]

    splicer = StreamSplicer("r")
    sent = output_of(splicer, event("start", **START), *events(first)[:delivered])
    splicer.restart()
    sent += output_of(splicer, event("start", **START), *events(second), done())
    parsed = [one for one in parse_events(sent) if one.name == "token"]
    assert [t for one in parsed for t in one.data["tokens"]] == tokens
    assert "".join(one.data["text"] for one in parsed) == "abcde"


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
def test_another_text_is_noticed(again: list[bytes]) -> None:
    splicer = StreamSplicer("r")
    output_of(splicer, event("start", **START), token("Once upon"))
    splicer.restart()
    with pytest.raises(Divergence):
        output_of(splicer, *again)


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_what_ends_a_text_from_outside_may_end_it_sooner(reason: str) -> None:
    splicer = StreamSplicer("r")
    output_of(splicer, event("start", **START), token("Once upon"))
    splicer.restart()
    assert '"finish_reason": "' + reason in output_of(
        splicer, event("start", **START), token("On"), done(0, finish_reason=reason)
    )


def test_the_seed_that_was_told_is_asked_for() -> None:
    splicer, body = StreamSplicer("r"), {"prompt": "Once", "max_tokens": 3}
    assert splicer.request(body) == body
    output_of(splicer, event("start", **START))
    assert splicer.request(body) == {**body, "seed": 7}


def test_a_client_that_runs_is_not_told_that_it_waits() -> None:
    splicer = StreamSplicer("r")
    waiting: dict[str, Any] = {"position": 1, "eta_ms": 5}
    assert "event: queue" in output_of(splicer, event("queue", **waiting))
    output_of(splicer, event("start", **START))
    assert output_of(splicer, event("queue", **waiting)) == ": ping\n\n"


@pytest.mark.parametrize("size", range(1, 40))
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_events_cut_anywhere_are_the_same_events(size: int, line_end: bytes) -> None:
    parser, wire = EventParser(), b": ping\n\nid: 1\nevent: a\ndata: x\n\ndata:y\ndata: z\n\n".replace(b"\n", line_end)
    found = [event for at in range(0, len(wire), size) for event in parser.feed(wire[at : at + size])]
    assert found == [Event("", b": ping"), Event("a", b"x", "1"), Event("message", b"y\nz")]
