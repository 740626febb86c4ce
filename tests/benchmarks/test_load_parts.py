"""The pure parts of the load generator: framing, events, percentiles, prompts, flags."""

from __future__ import annotations

import json
import statistics

import pytest
from httptools import HttpParserError

from benchmarks.client import Exchange
from benchmarks.common import percentile
from benchmarks.completions import Api, Completed, Failed, measure
from benchmarks.load import main
from benchmarks.load_plan import LoadPlan
from benchmarks.prompts import pseudo_prose

STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def answered(api: Api, *pieces: tuple[float, bytes]) -> Completed | Failed:
    """Of an exchange whose answer arrives in these pieces, sent at second 1."""
    exchange = Exchange(b"", api.marker)
    exchange.sent, exchange.status = 1.0, 200
    for arrived, piece in pieces:
        known = len(exchange.arrivals)
        exchange.on_body(piece)
        exchange.arrivals[known:] = [arrived] * (len(exchange.arrivals) - known)
    exchange.end()
    return measure(exchange)


@pytest.mark.parametrize("size", range(1, 40))
def test_chunks_cut_anywhere_give_the_same_bytes(size: int) -> None:
    exchange, wire = Exchange(b""), STREAM + b"7\r\nso many\r\nC;x=y\r\n small words\r\n0\r\nTrailer: x\r\n\r\n"
    for at in range(0, len(wire), size):
        exchange.parser.feed_data(wire[at : at + size])
    assert (exchange.status, exchange.body) == (200, b"so many small words")
    assert exchange.ended and not exchange.error


@pytest.mark.parametrize("size", range(1, 40))
def test_every_token_is_timed_wherever_its_event_is_cut(size: int) -> None:
    exchange = Exchange(b"")
    wire = b'event: token\ndata: {"text": "a"}\n\n' * 3 + b"event: done\ndata: {}\n\n"
    for at in range(0, len(wire), size):
        exchange.on_body(wire[at : at + size])
    assert len(exchange.arrivals) == 3


@pytest.mark.parametrize("wire", [b"zz\r\n", b"2\r\nabc\r\n", b"0\r\n\r\nHTTP/1.1 200 OK\r\n", b"-1\r\n"])
def test_a_body_that_breaks_the_framing_is_refused(wire: bytes) -> None:
    with pytest.raises(HttpParserError):
        Exchange(b"").parser.feed_data(STREAM + wire)


def test_the_first_token_is_the_first_with_text_and_gaps_lie_between_all_token_events() -> None:
    tokens = [
        (at, b'event: token\ndata: {"text": "%b"}\n\n' % text) for at, text in ((3, b""), (7, b"a"), (15, b"b c"))
    ]
    done = (31.0, b'event: done\ndata: {"usage": {"completion_tokens": 9}}\n\n')
    assert answered(Api.COMPLETE, *tokens, done) == Completed(first_token=6.0, gaps=[4.0, 8.0], tokens=9)


def _chunk(text: str, finish: str | None = None, **more: object) -> bytes:
    choices = [{"index": 0, "text": text, "finish_reason": finish}]
    return b"data: %b\n\n" % json.dumps({"choices": choices, **more}).encode()


DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("space", [b" ", b""])
def test_chunks_with_text_are_timed_and_the_last_one_counts(space: bytes) -> None:
    chunks = [(2.0, _chunk("")), (3.0, _chunk("a")), (7.0, _chunk("b c")), (8.0, _chunk("", "length"))]
    chunks += [(9.0, b'data: {"choices": [], "usage": {"completion_tokens": 9}}\n\n'), (9.5, DONE)]
    spaced = [(at, chunk.replace(b'": ', b'":' + space)) for at, chunk in chunks]
    assert answered(Api.OPENAI, *spaced) == Completed(first_token=2.0, gaps=[4.0], tokens=9)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_chunk("a", "length"), "the stream told no usage, so its tokens cannot be counted"),
        (_chunk("a", "error", usage={"completion_tokens": 1}), "the stream ended early: finish_reason error"),
        (b'data: {"error": {"message": "full"}}\n\n', "full"),
    ],
)
def test_a_stream_of_chunks_that_is_not_whole_is_a_failure(body: bytes, message: str) -> None:
    assert answered(Api.OPENAI, (1.0, body), (1.0, DONE)) == Failed(message)


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
