"""One streamed completion, timed as a client sees it.

An event's time is that at which the bytes that made it whole were read from the socket.
"""

from __future__ import annotations

import time

import msgspec

from benchmarks.http_body import ProtocolError
from benchmarks.http_client import Connection, NoAnswerError, Response, explain
from benchmarks.openai_timeline import OpenAITimeline
from benchmarks.sse import EventParser
from benchmarks.timeline import Completed, Failed, Timeline, printable, reason


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /complete. `ignore_eos`, so that each stream gives exactly `max_tokens`."""

    prompt: str | list[int]
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool = True
    stream: bool = True


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for a last chunk with the number of tokens."""

    include_usage: bool = True


class OpenAIRequest(CompletionRequest, frozen=True, kw_only=True):
    """The body of POST /v1/completions; filters that some servers would add by themselves are switched off."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)


async def complete(connection: Connection, request: CompletionRequest) -> Completed | Failed:
    """Never raises for what a server or a network can do: that is a Failed."""
    try:
        return await _complete(connection, request)
    except (OSError, ProtocolError, msgspec.MsgspecError) as error:
        connection.close()
        return Failed(printable(explain(error)))


async def _complete(connection: Connection, request: CompletionRequest) -> Completed | Failed:
    is_fresh = await connection.open()
    body = msgspec.json.encode(request)
    is_openai = isinstance(request, OpenAIRequest)
    path = "/v1/completions" if is_openai else "/complete"
    sent = time.perf_counter()
    try:
        response = await connection.request("POST", path, body)
    except (NoAnswerError, ConnectionError):
        if is_fresh:
            raise
        # llama-server says keep-alive and closes after each stream: as any client does, ask again on a new connection.
        connection.close()
        await connection.open()
        sent = time.perf_counter()
        response = await connection.request("POST", path, body)
    timeline = OpenAITimeline(sent=sent) if is_openai else Timeline(sent=sent)
    if response.status != 200:
        return Failed(f"HTTP {response.status}: {reason(await response.read_all())}")
    return await _follow(response, timeline)


async def _follow(response: Response, timeline: Timeline | OpenAITimeline) -> Completed | Failed:
    """Reads on to the end of the body after the terminal event, so that the connection can be used again."""
    parser = EventParser()
    outcome: Completed | Failed | None = None
    while piece := await response.read():
        now = time.perf_counter()
        for event in parser.feed(piece):
            outcome = outcome or timeline.take(event, now)
    if outcome is None:
        raise ProtocolError("the stream ended without a done event")
    return outcome
