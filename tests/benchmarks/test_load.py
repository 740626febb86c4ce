"""The load generator against a small fake server: counts, errors, and output."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import pstdev
from typing import Any, TypeVar

import msgspec
import pytest

from benchmarks.client import Exchange, keep_rate, parse_address
from benchmarks.common import alternate, median_of, percentile
from benchmarks.completions import Completed, CompletionRequest, Failed, OpenAIRequest, measure
from benchmarks.load import LevelProgress, LoadPlan, LoadResult, ServiceLevel, _gaps, main, parse_options, run
from benchmarks.prompts import pseudo_prose
from tests.support import ROOT

T = TypeVar("T")
Responder = Callable[[asyncio.StreamWriter, dict[str, Any]], Awaitable[None]]

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = ("done", {"choices": [{"index": 0, "finish_reason": "length"}], "usage": {"completion_tokens": 6}})
TOKENS = [("token", {"index": 0, "text": text}) for text in ("", "a b", " c")]


def events(*pairs: tuple[str, Any]) -> bytes:
    return b": hello\n\n" + b"".join(
        f"id: r:1\nevent: {name}\ndata: {json.dumps(data)}\n\n".encode() for name, data in pairs
    )


def chunks(body: bytes, size: int = 50) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


async def respond_fully(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """Chunks of 11 bytes, written 7 bytes at a time: no event begins at the start of a chunk or a write."""
    wire = HEAD + chunks(events(*TOKENS, DONE), 11)
    for at in range(0, len(wire), 7):
        writer.write(wire[at : at + 7])
        await asyncio.sleep(0)


async def never_respond(*_: object) -> None:
    await asyncio.sleep(60)


async def respond_twice_then_hang(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    await (respond_fully if body["seed"] < 2 else never_respond)(writer, body)


def respond_with(wire: bytes) -> Responder:
    async def respond(writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
        writer.write(wire)
        writer.close()

    return respond


class FakeServer:
    """Answers GET /v1/models with a list and POST /complete with `respond`; records the requests."""

    def __init__(self, respond: Responder) -> None:
        self.respond = respond
        self.bodies: list[dict[str, Any]] = []
        self.connections = 0

    async def handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    await self.handle_request(reader, writer)
        finally:
            writer.close()

    async def handle_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0]))
        if head.startswith(b"GET /v1/models "):
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"data": []}')
        elif head.startswith((b"POST /complete ", b"POST /v1/completions ")):
            self.bodies.append(json.loads(body))
            await self.respond(writer, self.bodies[-1])


def with_url(server: FakeServer, use: Callable[[str], Awaitable[T]]) -> T:
    async def serve() -> T:
        listener = await asyncio.start_server(server.handle_connection, "127.0.0.1", 0)
        try:
            return await use(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        finally:
            listener.close()  # do not wait: responses that hang are cancelled when the loop ends

    return asyncio.run(serve())


def load(server: FakeServer, **plan: Any) -> LoadResult:
    settings: dict[str, Any] = {"streams": (2,), "requests": 4, "prompt_words": 8} | plan
    return with_url(server, lambda url: run(LoadPlan(url=url, **settings)))


def bench(server: FakeServer, *flags: str) -> int:
    return with_url(server, lambda url: asyncio.to_thread(main, ["--url", url, *flags]))


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_tokens_come_from_the_usage_and_the_warm_up_is_not_counted() -> None:
    server = FakeServer(respond_fully)
    (level,) = load(server).levels
    assert (level.streams, level.requests, level.completed, level.errors, level.unfinished) == (2, 4, 4, 0, 0)
    assert (level.output_tokens, len(server.bodies)) == (4 * 6, 4 + 1)
    assert server.connections == 1 + 1 + 2  # the model list, the warm-up, and one for each stream
    assert level.output_tokens_per_second == pytest.approx(24 / level.seconds)


def test_each_request_asks_for_exactly_max_tokens_with_its_number_as_seed() -> None:
    server = FakeServer(respond_fully)
    load(server, streams=(1, 2), requests=None, max_tokens=6, temperature=0.5)
    warm_up, *counted = server.bodies
    assert warm_up["prompt"] not in [body["prompt"] for body in counted]
    assert sorted(body.pop("seed") for body in counted) == list(range(8 + 8))
    assert len({body.pop("prompt") for body in counted}) == 16
    assert counted == [{"max_tokens": 6, "temperature": 0.5, "ignore_eos": True, "stream": True}] * 16


def test_requests_to_other_servers_disable_every_sampling_filter() -> None:
    body = msgspec.to_builtins(LoadPlan(api="openai", max_tokens=6, temperature=0.5).request(3))
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"], body["seed"]) == (6, 0.5, True, 3)
    assert (body["top_k"], body["top_p"], body["min_p"], body["stream_options"]) == (0, 1, 0, {"include_usage": True})


def test_connection_closed_after_a_stream_is_reopened() -> None:
    """llama-server does this without announcing it."""
    server = FakeServer(respond_with(HEAD + chunks(events(*TOKENS, DONE))))
    (level,) = load(server, requests=12).levels
    assert (level.completed, level.errors) == (12, 0)


def test_connection_close_leads_to_a_new_connection_for_each_request() -> None:
    head = HEAD.replace(b"200 OK", b"200 OK\r\nConnection: close")
    result = load(FakeServer(respond_with(head + chunks(events(*TOKENS, DONE)))))
    assert (result.levels[0].completed, result.failed) == (4, False)


FULL = rb'{"error": {"message": "\u001bfull"}}'
BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n%b" % (len(FULL), FULL)


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (BUSY, "HTTP 503: full"),
        (b"HTTP/1.1 500 Oh\r\n\r\n<b>\r\n", "HTTP 500: <b>"),
        (b"", "the connection closed before the answer"),
        (b"SSH-2.0\r\n\r\n", "the answer does not begin like HTTP"),
        (HEAD + chunks(events(*TOKENS, DONE))[:150], "the connection closed in mid-response"),
        (HEAD + chunks(events(*TOKENS)), "the stream ended without a done event"),
        (HEAD + chunks(events(("error", {"error": {"message": "the engine died"}}))), "the engine died"),
        (HEAD + chunks(events(("done", {}))), "Object missing required field `usage`"),
        (
            HEAD
            + chunks(events(("done", {"choices": [{"finish_reason": "timeout"}], "usage": {"completion_tokens": 1}}))),
            "the stream ended early: finish_reason timeout",
        ),
    ],
)
def test_a_request_that_fails_is_counted_and_the_first_message_is_kept(wire: bytes, message: str) -> None:
    result = load(FakeServer(respond_with(wire)))
    level = result.levels[0]
    assert (level.errors, level.completed, level.first_error, result.failed) == (4, 0, message, True)
    assert (level.output_tokens, level.first_token_ms.p50, level.inter_token_ms.p99) == (0, None, None)


async def respond_after_a_second(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    await asyncio.sleep(1)
    await respond_fully(writer, body)


def test_a_rate_sends_requests_although_earlier_ones_have_not_ended() -> None:
    """A closed loop of any number of streams would take a second for each round."""
    server = FakeServer(respond_after_a_second)
    (level,) = load(server, rates=(100.0,), requests=30).levels
    assert (level.rate, level.requests, level.completed) == (100.0, 30, 30)
    assert level.streams > 15  # at 100 a second, all 30 are sent before the first one ends
    assert level.seconds < 10


def test_a_rate_reuses_idle_connections() -> None:
    server = FakeServer(respond_fully)
    (level,) = load(server, rates=(50.0,), requests=40).levels
    assert level.completed == 40
    assert server.connections < 1 + 1 + 40


def test_arrivals_of_a_rate_are_random_repeatable_and_as_many_as_asked() -> None:
    gaps = list(islice(_gaps(8.0, seed=3), 4000))
    assert gaps == list(islice(_gaps(8.0, seed=3), 4000)) != list(islice(_gaps(8.0, seed=4), 4000))
    assert sum(gaps) / 4000 == pytest.approx(1 / 8, rel=0.05)
    assert pstdev(gaps) == pytest.approx(1 / 8, rel=0.1)  # of exponential gaps; equal ones have none


def test_the_first_token_of_a_rate_counts_from_when_its_request_was_due() -> None:
    """A client that is late itself must not make the server look fast."""

    async def late() -> list[Exchange]:
        found: list[Exchange] = []
        listener = await asyncio.start_server(FakeServer(respond_fully).handle_connection, "127.0.0.1", 0)
        address = parse_address(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        gaps = iter([0.0, 0.01, 0.01])

        def exchanges() -> Iterator[Exchange]:
            yield LoadPlan().request(0).exchange(address)
            time.sleep(0.5)
            yield LoadPlan().request(1).exchange(address)

        await keep_rate(address, gaps, exchanges(), found.append)
        listener.close()
        return found

    times = [outcome.first_token for outcome in map(measure, asyncio.run(late())) if isinstance(outcome, Completed)]
    assert len(times) == 2
    assert max(time or 0.0 for time in times) > 0.45


@pytest.mark.parametrize(
    ("slo", "missed", "code"),
    [("60000,60000", [], 0), ("0.001,60000", ["first token"], 1), ("0.001,0.001", ["first token", "inter-token"], 1)],
)
def test_a_level_that_misses_the_objective_is_named_and_gives_status_1(
    slo: str, missed: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(FakeServer(respond_fully), "--rate", "50", "--requests", "6", "--slo", slo) == code
    *rows, last = capsys.readouterr().out.splitlines()
    assert [level["missed"] for level in json.loads(last)["levels"]] == [missed]
    assert rows[2].split()[:2] == ["50.0", "6"]
    assert rows[3].strip() == (f"SLO missed: {', '.join(missed)}" if missed else "SLO met")


def test_requests_that_fail_or_do_not_end_miss_every_objective(capsys: pytest.CaptureFixture[str]) -> None:
    for respond, seconds in ((respond_with(BUSY), "20"), (never_respond, "1.5")):
        flags = ["--rate", "50", "--requests", "4", "--slo", "--seconds", seconds, "--json-only"]
        assert bench(FakeServer(respond), *flags) == 1
        assert json.loads(capsys.readouterr().out)["levels"][0]["missed"] == ["requests"]


def test_without_flags_the_objective_is_a_second_and_a_tenth() -> None:
    plan, _ = parse_options(["--rate", "0.5,2", "--slo"])
    assert (plan.rates, plan.slo) == ((0.5, 2.0), ServiceLevel(first_token_ms=1000, inter_token_ms=100))
    assert [plan.requests_for(level) for level in plan.levels] == [15, 60]
    assert parse_options(["--rate", "0.2"])[0].requests_for(LevelProgress(rate=0.2)) == 8
    assert parse_options([])[0].slo is None


def test_requests_cut_by_the_time_limit_are_no_errors_if_others_finished() -> None:
    for seconds in (0.4, 10.0):  # on a busy machine the first one may finish no request
        result = load(FakeServer(respond_twice_then_hang), seconds=seconds)
        level = result.levels[0]
        if level.completed == 2:
            break
    assert (level.requests, level.completed, level.errors, level.unfinished) == (4, 2, 0, 2)
    assert not result.failed


def test_level_without_a_finished_request_fails() -> None:
    assert load(FakeServer(never_respond), seconds=0.1).failed


def test_unreachable_url_is_one_line_on_stderr_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    assert main(["--url", url]) == 2
    remedy = "start a service with inkstream serve, or name another with --url"
    assert capsys.readouterr() == ("", f"error: nothing answers at {url}: connection refused; {remedy}\n")


def test_output_has_a_row_for_each_level_and_ends_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(FakeServer(respond_fully), "--streams", "1,2", "--requests", "3") == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in rows[2:]] == [["1", "3", "0"], ["2", "3", "0"]]
    found = json.loads(last)
    assert [level["completed"] for level in found["levels"]] == [3, 3]
    assert (found["benchmark"], found["server"], found["interrupted"]) == ("load", {"data": []}, False)
    assert set(found["machine"]) == {"cpu", "cores", "python", "system"}


def test_json_only_prints_one_line_and_a_failed_request_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(FakeServer(respond_with(BUSY)), "--streams", "1", "--requests", "1", "--json-only") == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["levels"][0]["first_error"] == "HTTP 503: full"


def test_prompts_of_a_file_rotate_and_a_single_prompt_repeats(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    plan, is_json_only = parse_options(["--prompts", str(tmp_path / "prompts.txt")])
    assert ([plan.prompt(i) for i in range(3)], is_json_only) == (["one", "two", "one"], False)
    same = LoadPlan(same_prompt=True)
    assert same.prompt(7) == same.prompt(0)


def test_ctrl_c_prints_partial_results_and_exits_with_130() -> None:
    all_sent = asyncio.Event()

    async def respond(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        if body["seed"] == 3:
            all_sent.set()
        await respond_twice_then_hang(writer, body)

    async def interrupt(url: str) -> tuple[int | None, bytes, bytes]:
        command = [sys.executable, "-m", "benchmarks.load", "--url", url, "--streams", "2", "--requests", "4"]
        root, pipe = ROOT, asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, cwd=root, stdout=pipe, stderr=pipe)
        async with asyncio.timeout(60):
            await all_sent.wait()
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        return process.returncode, out, err

    returncode, out, err = with_url(FakeServer(respond), interrupt)
    assert err == b""
    found = json.loads(out.splitlines()[-1])
    assert found["interrupted"]
    assert [(level["completed"], level["unfinished"]) for level in found["levels"]] == [(2, 2)]
    assert returncode == 130


def measured(api: type[CompletionRequest], *pieces: tuple[float, bytes]) -> Completed | Failed:
    """Measures an exchange, sent at second 1, whose response arrives in these pieces."""
    exchange = Exchange(b"", api.MARKER)
    exchange.sent, exchange.status = 1.0, 200
    for arrived, piece in pieces:
        known = len(exchange.arrivals)
        exchange.on_body(piece)
        exchange.arrivals[known:] = [arrived] * (len(exchange.arrivals) - known)
    exchange.end()
    return measure(exchange)


def test_every_token_is_timed_wherever_reads_split_its_event() -> None:
    wire = b'event: token\ndata: {"text": "a"}\n\n' * 3 + b"event: done\ndata: {}\n\n"
    for size in range(1, 40):
        exchange = Exchange(b"")
        for at in range(0, len(wire), size):
            exchange.on_body(wire[at : at + size])
        assert len(exchange.arrivals) == 3, size


def test_the_first_token_is_the_first_with_text_and_gaps_lie_between_all_token_events() -> None:
    tokens = [
        (at, b'event: token\ndata: {"text": "%b"}\n\n' % text) for at, text in ((3, b""), (7, b"a"), (15, b"b c"))
    ]
    done = (31.0, b'event: done\ndata: {"usage": {"completion_tokens": 9}}\n\n')
    assert measured(CompletionRequest, *tokens, done) == Completed(first_token=6.0, gaps=[4.0, 8.0], tokens=9)


def _chunk(text: str, finish: str | None = None, **more: object) -> bytes:
    choices = [{"index": 0, "text": text, "finish_reason": finish}]
    return b"data: %b\n\n" % json.dumps({"choices": choices, **more}).encode()


LAST_CHUNK = b"data: [DONE]\n\n"


@pytest.mark.parametrize("space", [b" ", b""])
def test_chunks_with_text_are_timed_and_the_last_one_has_the_usage(space: bytes) -> None:
    chunks = [(2.0, _chunk("")), (3.0, _chunk("a")), (7.0, _chunk("b c")), (8.0, _chunk("", "length"))]
    chunks += [(9.0, b'data: {"choices": [], "usage": {"completion_tokens": 9}}\n\n'), (9.5, LAST_CHUNK)]
    spaced = [(at, chunk.replace(b'": ', b'":' + space)) for at, chunk in chunks]
    assert measured(OpenAIRequest, *spaced) == Completed(first_token=2.0, gaps=[4.0], tokens=9)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_chunk("a", "length"), "the stream told no usage, so its tokens cannot be counted"),
        (_chunk("a", "error", usage={"completion_tokens": 1}), "the stream ended early: finish_reason error"),
        (b'data: {"error": {"message": "full"}}\n\n', "full"),
    ],
)
def test_incomplete_stream_of_chunks_is_a_failure(body: bytes, message: str) -> None:
    assert measured(OpenAIRequest, (1.0, body), (1.0, LAST_CHUNK)) == Failed(message)


def test_percentiles_interpolate_and_a_single_value_is_every_percentile() -> None:
    assert (percentile([3.0, 1.0, 2.0], 50), percentile([1.0, 0.0], 99)) == (2.0, pytest.approx(0.99))
    assert percentile([3.0], 99) == 3.0


def test_measurements_alternate_and_the_first_round_warms_up() -> None:
    order: list[str] = []

    def measure_one(name: str) -> float:
        order.append(name)
        return float(len(order))

    rounds = alternate({name: partial(measure_one, name) for name in "abc"}, 2)
    assert order == [*"abc", *"bca", *"cab"]
    assert rounds == [{"b": 4, "c": 5, "a": 6}, {"c": 7, "a": 8, "b": 9}]
    assert (median_of(rounds, "a"), median_of(rounds, "a", by="b")) == (7, (6 / 4 + 8 / 9) / 2)


def test_url_defaults_to_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INKSTREAM_URL", "http://127.0.0.1:8123")
    assert parse_options([])[0].url == "http://127.0.0.1:8123"
    assert parse_options(["--url", "http://127.0.0.1:9"])[0].url == "http://127.0.0.1:9"
    monkeypatch.setenv("INKSTREAM_URL", "")
    assert parse_options([])[0].url == "http://127.0.0.1:8000"


def test_no_two_prompts_begin_with_the_same_words() -> None:
    prompts = [pseudo_prose(index=i, words=64, seed=seed) for i in range(-1, 500) for seed in (0, 1)]
    assert len({tuple(prompt.split()[:3]) for prompt in prompts}) == len(prompts)


def test_prompt_has_the_requested_words_and_is_deterministic() -> None:
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
        ("--rate 0", "requests per second above 0"),
        ("--rate 1,x", "not a list of rates"),
        ("--rate 2 --streams 8", "not allowed with"),
        ("--rate 4,8 --requests 240", "--rate 4 takes 60 s to send 240 requests: give --seconds 80"),
        ("--rate 0.1", "--rate 0.1 takes 80 s to send 8 requests"),
        ("--rate 2 --requests 0", "--requests must be"),
        ("--slo 5", "not two numbers of milliseconds"),
        ("--slo 0,5", "not two numbers of milliseconds"),
        ("--max-tokens 0", "--max-tokens must be"),
        ("--prompt-words 0", "--prompt-words must be"),
        ("--temperature nan", "--temperature must be"),
        ("--seconds 0", "--seconds must be"),
        ("--prompts /nowhere", "cannot be read"),
        ("--prompts /dev/null", "holds no prompts"),
        (f"--prompts {shlex.quote(__file__)} --prompt-words 3", "not allowed with"),
        ("--what", "unrecognized arguments"),
    ],
)
def test_flags_without_a_valid_plan_exit_with_2(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(flags))
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
