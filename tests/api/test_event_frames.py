"""Streams of either API: an error in the middle of a write, and a connection that a newer one replaced."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from app.api.event_frames import EventFrames
from app.api.openai.routes import _CompletionsResponder
from app.engine_client.token_stream import Consumer, Writes
from app.generation.request import CompletionEvent, Delta, Finished, TokenDetail
from app.http.errors import ApiError


class _Completion:
    """A session whose events are available at once and which never ends."""

    is_done = False
    last_event_at = 1.0
    inter_token_latencies = ()
    stream = SimpleNamespace(work_seconds=0.0)

    def __init__(self, *texts: str) -> None:
        self.events = deque(Delta(0, text) for text in texts)

    async def wait_event(self, consumer: Consumer) -> bool:
        writes: Writes = []
        must_wake = not consumer(writes)
        for write, data in writes:
            write(data)
        return must_wake and bool(self.events)


def _handle(*texts: str) -> Any:
    return SimpleNamespace(
        name="r",
        callers_id="",
        session=_Completion(*texts),
        admitted=SimpleNamespace(truncated=False),
        record_progress=lambda: None,
        on_error=lambda error: ApiError(500, f"broken by {error}"),
    )


class _Texts(EventFrames):
    """A frame is the event's text; encoding the text "bad" fails."""

    def __init__(self, *texts: str) -> None:
        super().__init__(_handle(*texts))
        self.is_finished = False

    def encode(self, event: CompletionEvent) -> bytes:
        assert isinstance(event, Delta)
        if event.text == "bad":
            raise ValueError(event.text)
        return event.text.encode()

    def encode_end(self) -> bytes:
        return b""

    def encode_error(self, body: dict[str, Any]) -> bytes:
        return f"({body['error']['message']})".encode()


class _Writer:
    is_ready = True

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def prepare(self, body: bytes) -> Any:
        return self.written.append, body


def test_error_written_while_the_task_slept_ends_the_stream() -> None:
    frames, writer = _Texts("a", "b", "bad", "c"), _Writer()
    assert asyncio.run(frames.next_frames(writer)) == b""  # type: ignore[arg-type]
    assert writer.written == [b"ab(broken by bad)"]
    assert frames.is_finished


def test_replaced_connection_takes_no_events() -> None:
    frames, writer = _Texts("a"), _Writer()
    assert asyncio.run(frames.next_frames(writer, lambda: False)) == b""  # type: ignore[arg-type]
    assert not writer.written
    assert asyncio.run(frames.next_frames(None)) == b"a"


class _BrokenChunks(_CompletionsResponder):
    """Fails to encode the text "bad"."""

    def _chunk(self, index: int, text: str, tokens: Sequence[TokenDetail], finished: Finished | None = None) -> bytes:
        if text == "bad":
            raise ValueError(text)
        return super()._chunk(index, text, tokens, finished)


def test_frames_encoded_before_an_error_are_sent_first() -> None:
    body: Any = SimpleNamespace(stream=True, stream_options=None, user=None, request_id=None, warnings=[])
    head = {"id": "r", "object": "o", "created": 1, "model": "m", "system_fingerprint": "f", "seed": 2}

    async def read() -> bytes:
        responder = _BrokenChunks(_handle("a", "b", "bad", "c"), body, head)
        return b"".join([frames async for frames in responder._frames(None)])

    blocks = asyncio.run(read()).decode().split("\n\n")
    assert blocks[3:] == ["data: [DONE]", ""]
    first, second, error = (json.loads(block.removeprefix("data: ")) for block in blocks[:3])
    assert [first["choices"][0]["text"], second["choices"][0]["text"]] == ["a", "b"]
    assert error["error"]["message"] == "broken by bad"
