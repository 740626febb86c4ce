"""Server-sent events: what the writer writes, the parser reads, wherever the bytes are split."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.schemas import Token, TokenEvent
from app.common.fault_injection import InjectedFault
from app.http.sse import PING, Event, EventParser, ascii_json, event, parse_event, quoted
from tests.support.armed_faults import arm_this_process

TEXTS = st.text() | st.text('\r\n\u2028\x00:"\\ \U0001f98ae\u0301', max_size=20)
# Lines of a stream: fields, comments, fields without a value, lines of spaces, unknown fields, and ends of events.
FIELDS = [b"data: a", b"data:b", b"data:  c ", b"data", b"data: \xc3\xa9", b"event: token", b"event:done", b"id: x:1"]
LINES = st.sampled_from([*FIELDS, b": ping", b":", b"retry: 5", b"unknown: x", b" data: no", b"", b"", b"", b""])
ENDS = st.sampled_from([b"\n", b"\r\n"])


def _reference(stream: bytes) -> list[Event]:
    """One line at a time, as the standard describes it, with comments as events of their own if they stand alone."""
    found, lines = list[Event](), list[bytes]()
    for line in stream.replace(b"\r\n", b"\n").split(b"\n")[:-1]:
        if line:
            lines.append(line)
            continue
        fields = [(name, value.removeprefix(b" ")) for name, _, value in (each.partition(b":") for each in lines)]
        data = [value for name, value in fields if name == b"data"]
        if data:
            last = {name: value.decode("ascii") for name, value in fields if name in (b"event", b"id")}
            found.append(Event(last.get(b"event", "message"), b"\n".join(data), last.get(b"id", "")))
        elif lines and lines[0].startswith(b":"):
            found.append(Event("", b"\n".join(lines)))
        lines = []
    return found


@given(st.lists(st.tuples(LINES, ENDS), max_size=30), st.lists(st.integers(0, 400), max_size=8))
def test_a_stream_split_anywhere_gives_the_same_events(lines: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    stream = b"".join(line + end for line, end in lines)
    parser, found = EventParser(), list[Event]()
    for start, end in pairwise([0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]):
        found += parser.feed(stream[start:end])
    assert found == _reference(stream)


def test_every_split_in_two_gives_the_same_events() -> None:
    stream = b"\r\n".join(
        [b"id: r:0", b"event: token", b"data: {}", b"", b": ping", b"", b"data: a", b"data: b", b"", b""]
    )
    for cut in range(len(stream) + 1):
        parser = EventParser()
        found = [*parser.feed(stream[:cut]), *parser.feed(stream[cut:])]
        assert found == [Event("token", b"{}", "r:0"), Event("", b": ping"), Event("message", b"a\nb")], cut
        assert parser.feed(b"data: c\n\n") == [Event("message", b"c")], cut


def test_an_unfinished_event_is_not_delivered() -> None:
    parser = EventParser()
    assert parser.feed(b"event: done\ndata: {}\n") == []
    assert parser.feed(b"\n") == [Event("done", b"{}")]
    assert parser.feed(b"\n\n") == []


@given(st.lists(TEXTS, max_size=5), st.booleans())
def test_written_events_are_read_back(texts: list[str], pings: bool) -> None:
    """Whatever is in a text, an event is three ASCII lines and ends with the only empty one."""
    frames = [event("token", {"text": text, "n": [None, 1.5]}, f"req-1:{i}") for i, text in enumerate(texts)]
    for frame in frames:
        assert frame.isascii() and frame.count(b"\n") == 4 and b"\r" not in frame and frame.endswith(b"\n\n")
    found = EventParser().feed((PING if pings else b"").join([*frames, b""]))
    read = [(one.name, json.loads(one.data)["text"], one.id) for one in found if one.name]
    assert read == [("token", text, f"req-1:{i}") for i, text in enumerate(texts)]
    assert sum(not one.name for one in found) == len(texts) * pings


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (b"data: a", Event("message", b"a")),
        (b"data:a\ndata:\ndata: b", Event("message", b"a\n\nb")),
        (b"data", Event("message", b"")),
        (b"event: done\nid: r:3\ndata: {}", Event("done", b"{}", "r:3")),
        (b"id: 1\nid: 2\ndata: x", Event("message", b"x", "2")),
        (b": a comment\ndata: x", Event("message", b"x")),
        (b": a comment", Event("", b": a comment")),
        (b"event: done", None),
        (b"retry: 10", None),
        (b"", None),
        (b"data: a: b", Event("message", b"a: b")),
        (b"data:  two spaces", Event("message", b" two spaces")),
    ],
)
def test_fields_of_a_block_are_read_as_the_standard_says(block: bytes, expected: Event | None) -> None:
    assert parse_event(block) == expected


@given(TEXTS)
def test_texts_are_quoted_as_ascii_json(text: str) -> None:
    assert quoted(text) == json.dumps(text) and json.loads(quoted(text)) == text


def test_response_models_and_builtins_are_encoded_alike() -> None:
    model = TokenEvent(index=0, text="\u2028", tokens=[Token(id=5, text="a", bytes=[97], logprob=-0.5, top=[])])
    plain: dict[str, Any] = json.loads(ascii_json(model))
    assert ascii_json(plain) == ascii_json(model) and plain["text"] == "\u2028"
    assert "tokens" not in json.loads(ascii_json(TokenEvent(index=0, text="a"))), "fields without a value are left out"


def test_a_fault_can_be_injected_into_one_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arm_this_process(tmp_path, monkeypatch).arm("api.event", "raise", match="victim")
    assert event("done", {}, "other:0")
    with pytest.raises(InjectedFault):
        event("done", {}, "victim:0")
