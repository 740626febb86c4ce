"""Concurrent clients of all endpoints, whose outputs leave out fields that differ from run to run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from benchmarks.client import Address, Client, Exchange
from tests.support import processes
from tests.support.completion_client import parse_events
from tests.support.servers import Server
from tests.support.trials import Trials

_LONGEST = 600.0
"""Seconds after which clients give up."""
_VOLATILE = {"id", "created", "timings", "request_id", "cached_tokens", "prompt_tokens_details"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request."""

    path: str = "/complete"
    body: dict[str, Any]


def seeded(body: dict[str, Any], n: int) -> list[RequestSpec]:
    """`n` requests for the same completion, with seeds from 0."""
    return [RequestSpec(body={**body, "seed": seed}) for seed in range(n)]


class CompletionExchange(Exchange):
    """A request and the response received so far, which the test may read from another thread."""

    __slots__ = ("_received",)

    def reset(self) -> None:
        super().reset()
        self._received = bytearray()

    def on_body(self, piece: bytes) -> None:
        self._received += piece
        super().on_body(piece)

    @property
    def body(self) -> bytes:
        """The body so far, without chunk framing."""
        return bytes(self._received)

    @property
    def name(self) -> str:
        """X-Request-Id."""
        return self.headers.get("x-request-id", "")

    @property
    def seed(self) -> object:
        """The seed in the body of the request, if there is one."""
        body = self.wire.partition(b"\r\n\r\n")[2]
        return json.loads(body).get("seed") if body else None

    @property
    def n_events(self) -> int:
        """Number of stream events so far."""
        return self.body.count(b"\n\n")

    @property
    def n_tokens(self) -> int:
        """Number of token events so far."""
        return len(self.arrivals)

    @property
    def is_complete(self) -> bool:
        """Whether the stream ended with `done`, exactly once."""
        return self.body.count(b"event: done") == 1 and b"event: error" not in self.body

    @property
    def gaps(self) -> list[float]:
        """Seconds between arrivals of one or more tokens."""
        return [after - before for before, after in pairwise(self.arrivals) if after > before]

    def output(self) -> Any:
        """Output without the fields that differ from run to run; checks the format strictly."""
        assert not self.error, self.error
        text = self.body.decode()
        if text.startswith("{"):
            return _same(json.loads(text))
        if text.startswith("id:"):
            return _output_of_events(text)
        return _output_of_chunks(text)


def exchange_with_body(body: bytes) -> CompletionExchange:
    """An exchange with this response body and status 200, without a request."""
    answer = CompletionExchange(b"")
    answer.status = 200
    answer.on_body(body)
    return answer


@contextmanager
def concurrent_requests(
    server: Server, specs: Sequence[RequestSpec], *, pause: float = 0.0, disconnect: threading.Event | None = None
) -> Iterator[list[CompletionExchange]]:
    """Sends all requests at once; responses arrive while the block runs, and are complete at its end.

    pause: seconds that a client waits after each read. disconnect: event on which all clients disconnect; the end of
    the block sets it too.
    """
    address = server.service.address
    answers = [CompletionExchange(address.request("POST", spec.path, json.dumps(spec.body).encode())) for spec in specs]
    thread = threading.Thread(target=asyncio.run, args=(_send_all(address, answers, pause, disconnect),))
    thread.start()
    try:
        yield answers
    finally:
        if disconnect:
            disconnect.set()
        thread.join()


def send_all(server: Server, specs: Sequence[RequestSpec]) -> list[CompletionExchange]:
    """Sends all requests at once and waits for their responses."""
    with concurrent_requests(server, specs) as answers:
        pass
    return answers


class _PausingClient(Client):
    """A client that pauses after each read."""

    def __init__(self, address: Address, pause: float) -> None:
        super().__init__(address)
        self._pause = pause

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._pause and (transport := cast(asyncio.Transport | None, self._transport)):
            transport.pause_reading()
            asyncio.get_running_loop().call_later(self._pause, transport.resume_reading)


async def _send_all(
    address: Address, answers: list[CompletionExchange], pause: float, disconnect: threading.Event | None
) -> None:
    clients = [_PausingClient(address, pause) for _ in answers]
    work = asyncio.gather(*(client.run(answer) for client, answer in zip(clients, answers, strict=True)))
    deadline = time.monotonic() + _LONGEST
    while not (work.done() or (disconnect and disconnect.is_set()) or time.monotonic() > deadline):
        await asyncio.wait([work], timeout=0.01 if disconnect else 1.0)
    for client in clients:
        client.close()
    for answer in answers:
        answer.end("disconnected")
    work.cancel()
    with suppress(asyncio.CancelledError):
        await work


def _same(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _same(one) for name, one in value.items() if name not in _VOLATILE}
    return [_same(one) for one in value] if isinstance(value, list) else value


def _output_of_events(text: str) -> Any:
    events = parse_events(text)
    assert [int(event.id.rpartition(":")[2]) for event in events] == list(range(len(events)))
    assert [event.name in ("done", "error") for event in events] == [False] * (len(events) - 1) + [True]
    texts: dict[int, str] = {}
    tokens: dict[int, list[Any]] = {}
    for event in events:
        if event.name == "token":
            index = event.data["index"]
            texts[index] = texts.get(index, "") + event.data["text"]
            tokens.setdefault(index, []).extend(event.data.get("tokens", []))
    return {"texts": texts, "tokens": tokens, "end": _same(events[-1].data)}


def _output_of_chunks(text: str) -> Any:
    blocks = text.replace(": ping\n", "").split("\n\n")  # several may precede a chunk; JSON escapes line ends
    assert blocks[-2:] == ["data: [DONE]", ""], text[-200:]
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.get("choices", []):
            assert choice["index"] not in ends, "a chunk after the finish reason"
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"]:
                ends[choice["index"]] = choice["finish_reason"]
    return {"texts": texts, "ends": ends, "errors": [_same(chunk["error"]) for chunk in chunks if "error" in chunk]}


def outputs(answers: Sequence[CompletionExchange]) -> list[Any]:
    """The output of each exchange."""
    return [answer.output() for answer in answers]


def compare_outputs(server: Server, answers: Sequence[CompletionExchange], expected: Sequence[Any]) -> Trials:
    """Compares the output of each response of a server with the expected one."""
    trials = Trials()
    for answer, one in zip(answers, expected, strict=True):
        try:
            output = answer.output()
        except AssertionError as error:  # not a whole response: a difference, too
            output = f"{error}: {answer.body[-200:]!r}"
        trials.compare(one, output, seed=answer.seed, request_id=answer.name, log=server.log)
    return trials


def kill_engine(server: Server, *others: int) -> None:
    """Kills the engine and `others`; waits until the metric counts a restart: a fake engine is never seen missing."""
    before = server.metric("engine_restarts_total")
    for pid in (engine_pid(server), *others):
        os.kill(pid, signal.SIGKILL)
    assert server.wait_for(lambda: server.metric("engine_restarts_total") > before)


def children(server: Server) -> list[int]:
    """Child processes of the service."""
    return processes.children(server.process.pid)


def engine_pid(server: Server) -> int:
    """The engine process, real or fake."""
    (pid,) = engine_pids(server)
    return pid


def engine_pids(server: Server) -> list[int]:
    """Process ids of the engines; empty while they start."""
    commands = {pid: _command(pid) for pid in children(server)}
    engines = (b"app.engine", b"tests.support.fake_engine")
    return [pid for pid, command in commands.items() if any(engine in command for engine in engines)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return b""


def is_ready(server: Server) -> bool:
    """Whether /health/ready is 200; False if the service does not answer."""
    return server.service.status("/health/ready") == 200


def is_live(server: Server) -> bool:
    """Whether /health/live is 200."""
    return server.service.status("/health/live") == 200
