"""The pure parts of the load generator: framing, events, percentiles, prompts, flags."""

from __future__ import annotations

import json
import statistics

import pytest

from benchmarks.completion_client import Completed, Event, EventParser, Failed, NativeTimeline, OpenAITimeline
from benchmarks.concurrency import percentile
from benchmarks.http_client import ChunkedBody, LengthBody, ProtocolError, UntilCloseBody
from benchmarks.load import main
from benchmarks.load_plan import LoadPlan
from benchmarks.prompts import pseudo_prose


@pytest.mark.parametrize("size", range(1, 40))
def test_chunks_cut_anywhere_give_the_same_bytes(size: int) -> None:
    body, wire = ChunkedBody(), b"7\r\nso many\r\nC;x=y\r\n small words\r\n0\r\nTrailer: x\r\n\r\n"
    assert b"".join(body.feed(wire[at : at + size]) for at in range(0, len(wire), size)) == b"so many small words"
    assert body.done


@pytest.mark.parametrize("size", range(1, 40))
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_events_cut_anywhere_are_the_same_events(size: int, line_end: bytes) -> None:
    parser, wire = EventParser(), b": ping\n\nid: 1\nevent: a\ndata: x\n\ndata:y\ndata: z\n\n".replace(b"\n", line_end)
    found = [event for at in range(0, len(wire), size) for event in parser.feed(wire[at : at + size])]
    assert found == [Event(b"a", b"x"), Event(b"message", b"y\nz")]


@pytest.mark.parametrize("wire", [b"zz\r\n", b"2\r\nabc\r\n", b"0\r\n\r\nmore", b"-1\r\n"])
def test_a_body_that_breaks_the_framing_is_refused(wire: bytes) -> None:
    with pytest.raises(ProtocolError):
        ChunkedBody().feed(wire)


@pytest.mark.parametrize("body", [ChunkedBody(), LengthBody(3)])
def test_a_body_that_ends_too_soon_is_refused(body: ChunkedBody | LengthBody) -> None:
    with pytest.raises(ProtocolError, match="mid-response"):
        body.finish()


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    body = UntilCloseBody()
    assert body.feed(b"ab") == b"ab"
    body.finish()
    assert body.done


def test_the_first_token_is_the_first_with_text_and_gaps_lie_between_all_token_events() -> None:
    timeline = NativeTimeline(sent=1.0)
    for now, text in ((3.0, ""), (7.0, "a"), (15.0, "b c d")):
        assert timeline.take(Event(b"token", b'{"index": 0, "text": "%b"}' % text.encode()), now) is None
    outcome = timeline.take(Event(b"done", b'{"usage": {"completion_tokens": 9}}'), 31.0)
    assert outcome == Completed(first_token=6.0, gaps=[4.0, 8.0], tokens=9)


def _chunk(text: str, finish: str | None = None, **more: object) -> Event:
    choices = [{"index": 0, "text": text, "finish_reason": finish}]
    return Event(b"message", json.dumps({"choices": choices, **more}).encode())


def test_chunks_with_text_are_timed_and_the_last_one_counts() -> None:
    timeline = OpenAITimeline(sent=1.0)
    for now, event in ((2.0, _chunk("")), (3.0, _chunk("a")), (7.0, _chunk("b c")), (8.0, _chunk("", "length"))):
        assert timeline.take(event, now) is None
    usage = Event(b"message", b'{"choices": [], "usage": {"completion_tokens": 9}}')
    assert timeline.take(usage, 9.0) is None
    assert timeline.take(Event(b"message", b"[DONE]"), 9.5) == Completed(first_token=2.0, gaps=[4.0], tokens=9)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([_chunk("a", "length")], "the stream told no usage, so its tokens cannot be counted"),
        ([_chunk("a", "error", usage={"completion_tokens": 1})], "the stream ended early: finish_reason error"),
        ([Event(b"message", b'{"error": {"message": "full"}}')], "full"),
    ],
)
def test_a_stream_of_chunks_that_is_not_whole_is_a_failure(events: list[Event], message: str) -> None:
    timeline = OpenAITimeline(sent=0.0)
    outcomes = [timeline.take(event, 1.0) for event in (*events, Event(b"message", b"[DONE]"))]
    assert next(filter(None, outcomes)) == Failed(message)


def test_percentiles_are_those_of_the_standard_library() -> None:
    values = [0.5, 1.0, 4.0, 4.5, 9.0, 20.0, 21.0]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert [percentile(values, p) for p in range(1, 100)] == pytest.approx(cuts)


def test_percentiles_reach_from_the_least_to_the_greatest() -> None:
    assert [percentile([1.0, 2.0, 4.0], p) for p in (0, 50, 100)] == [1.0, 2.0, 4.0]
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="no percentile"):
        percentile([], 50)


def test_no_two_prompts_begin_with_the_same_words() -> None:
    prompts = [pseudo_prose(index=i, words=64, seed=seed) for i in range(-1, 500) for seed in (0, 1)]
    assert len({tuple(prompt.split()[:3]) for prompt in prompts}) == len(prompts)


def test_a_prompt_has_exactly_its_words_and_is_the_same_each_time() -> None:
    for words in (1, 2, 3, 64):
        assert len(pseudo_prose(index=3, words=words, seed=0).split()) == words
    assert pseudo_prose(index=3, words=64, seed=0) == pseudo_prose(index=3, words=64, seed=0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--url http://example.org:8000", "--allow-remote"),
        ("--url 127.0.0.1:8000", "must look like http://127.0.0.1:8000"),
        ("--url http://127.0.0.1:99999", "Port out of range"),
        ("--url http://me:secret@127.0.0.1", "a scheme, a host, a port and a path only"),
        ("--streams 1,x", "not a list of numbers"),
        ("--streams 0", "numbers from 1 to 4096"),
        ("--streams 8 --requests 4", "too few to keep 8 streams busy"),
        ("--max-tokens 0", "--max-tokens must be"),
        ("--prompt-words 0", "--prompt-words must be"),
        ("--temperature nan", "--temperature must be"),
        ("--seconds 0", "--seconds must be"),
        ("--prompts /nowhere", "cannot be read"),
        ("--prompts /dev/null", "holds no prompts"),
        (f"--prompts {__file__} --prompt-words 3", "not allowed with"),
        ("--what", "unrecognized arguments"),
    ],
)
def test_flags_that_make_no_plan_are_status_2(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags.split())
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("url", ["http://localhost:1", "http://127.9.9.9:1/base/", "http://[::1]:1"])
def test_loopback_needs_no_permission(url: str) -> None:
    assert LoadPlan(url=url).address.port == 1


def test_another_machine_is_allowed_if_asked() -> None:
    assert LoadPlan(url="https://example.org", allow_remote=True).address.port == 443
