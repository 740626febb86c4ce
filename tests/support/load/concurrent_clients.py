"""Concurrent clients of all endpoints, and their answers without the fields that differ from run to run."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.service_process import child_pids
from tests.support.completion_client import parse_events
from tests.support.servers import Server

_VOLATILE = {"id", "created", "timings", "request_id", "cached_tokens", "prompt_tokens_details"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request."""

    path: str = "/complete"
    body: dict[str, Any]


@dataclass(slots=True)
class Answer:
    """The answer received so far."""

    status: int = 0
    name: str = ""
    """X-Request-Id."""
    body: bytearray = field(default_factory=bytearray)
    error: str = ""
    """The client library's error if the connection broke."""

    @property
    def n_events(self) -> int:
        """Events of a stream so far."""
        return self.body.count(b"\n\n")

    def told(self) -> Any:
        """Output without the fields that differ from run to run; checks the form strictly."""
        assert not self.error, self.error
        text = self.body.decode()
        if text.startswith("{"):
            return _same(json.loads(text))
        if text.startswith("id:"):
            return _output_of_events(text)
        return _output_of_chunks(text)


@contextmanager
def crowd(
    server: Server, asks: Sequence[Ask], *, pause: float = 0.0, disconnect: threading.Event | None = None
) -> Iterator[list[Answer]]:
    """Sends all requests at once; the answers fill while the test runs, and are complete at the end.

    pause: seconds that a client waits after each read. disconnect: all clients disconnect when this event is set,
    which the end of the block does too.
    """
    answers = [Answer() for _ in asks]
    work = _until(disconnect, _visit(server.url, asks, answers, pause))
    thread = threading.Thread(target=asyncio.run, args=(work,))
    thread.start()
    try:
        yield answers
    finally:
        if disconnect:
            disconnect.set()
        thread.join()


def visit(server: Server, asks: Sequence[Ask]) -> list[Answer]:
    """Sends all requests at once and waits for their answers."""
    with crowd(server, asks) as answers:
        pass
    return answers


async def _until(disconnect: threading.Event | None, work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    while disconnect and not task.done() and not disconnect.is_set():
        await asyncio.wait([task], timeout=0.01)
    if disconnect:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _visit(url: str, asks: Sequence[Ask], answers: list[Answer], pause: float) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        await asyncio.gather(*(_ask(client, ask, answer, pause) for ask, answer in zip(asks, answers, strict=True)))


async def _ask(client: httpx.AsyncClient, ask: Ask, answer: Answer, pause: float) -> None:
    try:
        async with client.stream("POST", ask.path, json=ask.body) as response:
            answer.status, answer.name = response.status_code, response.headers.get("x-request-id", "")
            async for part in response.aiter_raw():
                answer.body += part
                if pause:
                    await asyncio.sleep(pause)
    except httpx.TransportError as error:
        answer.error = repr(error)


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
    blocks = [block.removeprefix(": ping\n") for block in text.split("\n\n")]
    assert blocks[-2:] == ["data: [DONE]", ""], text[-200:]
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.get("choices", []):
            assert choice["index"] not in ends, "nothing comes behind the end"
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"]:
                ends[choice["index"]] = choice["finish_reason"]
    return {"texts": texts, "ends": ends, "errors": [_same(chunk["error"]) for chunk in chunks if "error" in chunk]}


def children(server: Server) -> list[int]:
    """Processes of the service, except its first."""
    return child_pids(server.process.pid)


def engine_pid(server: Server) -> int:
    """The engine process, real or fake."""
    (pid,) = engine_pids(server)
    return pid


def engine_pids(server: Server) -> list[int]:
    """Empty while an engine starts."""
    commands = {pid: _command(pid) for pid in children(server)}
    engines = (b"app.engine", b"tests.support.fake_engine")
    return [pid for pid, command in commands.items() if any(engine in command for engine in engines)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return b""


def is_gone(pid: int) -> bool:
    """Whether a process has ended, zombies included."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def is_ready(server: Server) -> bool:
    """Whether /health/ready is 200; False if the service does not answer."""
    return server.service.status("/health/ready") == 200


def is_live(server: Server) -> bool:
    """Whether /health/live is 200."""
    return server.service.status("/health/live") == 200
