"""Deliveries of either API: who writes the frames, errors in the middle of a write, slow and replaced connections."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from types import SimpleNamespace
from typing import Any

from app.api.delivery import Connection, Delivery
from app.api.openai.routes import _CompletionsResponder
from app.engine_client.open_sequences import Writes
from app.generation.completion import Consumer
from app.generation.request import CompletionEvent, Delta, Finished
from app.http.errors import ApiError
from tests.support.async_test import async_test


class _Completion:
    """A completion whose events the test adds."""

    work_seconds = 0.0
    inter_token_latencies = ()
    last_event_at = 1.0
    failure: Exception | None = None

    def __init__(self, *texts: str) -> None:
        self.events: deque[CompletionEvent] = deque(Delta(0, text) for text in texts)
        self.n_resumed = 0
        self._consumer: Consumer | None = None

    @property
    def is_done(self) -> bool:
        return not self.events and self.failure is None

    def read(self, consumer: Consumer | None) -> None:
        self._consumer = consumer

    def resume(self) -> None:
        self.n_resumed += 1

    def add(self, *texts: str) -> bool:
        """Adds texts as an engine's report does; returns whether the reader keeps up."""
        self.events.extend(Finished(0, "length") if text == "end" else Delta(0, text) for text in texts)
        return self.flush()

    def flush(self) -> bool:
        assert self._consumer
        writes: Writes = []
        keeps_up = self._consumer(writes)
        for write, data in writes:
            write(data)
        return keeps_up


def _handle(completion: _Completion) -> Any:
    return SimpleNamespace(
        name="r",
        public_name="r",
        completion=completion,
        admitted=SimpleNamespace(truncated=False, request=SimpleNamespace(resumption=None)),
        record_progress=lambda: None,
        record_finished=lambda _: None,
        on_error=lambda error: ApiError(500, f"broken by {error}"),
    )


class _Texts(Delivery):
    """A frame is the event's text; encoding the text "bad" fails."""

    def __init__(self, completion: _Completion) -> None:
        super().__init__(_handle(completion))

    def encode(self, event: CompletionEvent) -> bytes:
        if isinstance(event, Finished):
            return b"."
        assert isinstance(event, Delta)
        if event.text == "bad":
            raise ValueError(event.text)
        return event.text.encode()

    def encode_end(self) -> bytes:
        return b"END"

    def encode_error(self, body: dict[str, Any]) -> bytes:
        return f"({body['error']['message']})".encode()


class _Writer:
    is_ready = True

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def prepare(self, body: bytes) -> Any:
        return self.written.append, body


class _Reader:
    """The task of a response."""

    def __init__(self, delivery: Delivery, writer: _Writer | None) -> None:
        self.connection, self.sent = Connection(), list[bytes]()
        delivery.attach(self.connection)
        self._frames = delivery.frames(self.connection, writer)  # type: ignore[arg-type]
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for frames in self._frames:
            self.sent.append(frames)


async def _turns(n: int = 5) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


@async_test
async def test_frames_are_written_while_the_task_sleeps_and_the_task_ends_the_response() -> None:
    completion, writer = _Completion("a"), _Writer()
    delivery = _Texts(completion)
    reader = _Reader(delivery, writer)
    await _turns()
    assert (reader.sent, writer.written) == ([b"a"], []), "what came first is the task's"
    assert completion.add("b", "c") and completion.add("d")
    assert writer.written == [b"bc", b"d"] and not reader.task.done()
    completion.add("e", "end")
    assert writer.written[-1] == b"e.END" and delivery.is_finished
    await asyncio.wait_for(reader.task, 10)
    assert reader.sent == [b"a"]


@async_test
async def test_a_slow_client_is_served_by_the_task_and_the_completion_then_resumes() -> None:
    completion, writer = _Completion(), _Writer()
    delivery = _Texts(completion)
    reader = _Reader(delivery, writer)
    await _turns()
    before = completion.n_resumed
    writer.is_ready = False
    assert not completion.add("a"), "a connection that is not ready does not keep up"
    assert not writer.written
    await _turns()
    assert reader.sent == [b"a"] and completion.n_resumed > before
    writer.is_ready = True
    assert completion.add("b") and writer.written == [b"b"]
    reader.task.cancel()


@async_test
async def test_without_a_writer_the_task_sends_everything() -> None:
    completion = _Completion()
    reader = _Reader(_Texts(completion), None)
    for text in ("a", "b", "end"):
        await _turns()
        completion.add(text)
    await asyncio.wait_for(reader.task, 10)
    assert reader.sent == [b"a", b"b", b".END"]


@async_test
async def test_error_written_while_the_task_slept_ends_the_stream() -> None:
    completion, writer = _Completion(), _Writer()
    delivery = _Texts(completion)
    reader = _Reader(delivery, writer)
    await _turns()
    completion.add("a", "b", "bad", "c")
    assert writer.written == [b"ab(broken by bad)"]
    await asyncio.wait_for(reader.task, 10)
    assert delivery.is_finished and not reader.sent


@async_test
async def test_failure_of_the_completion_comes_after_its_events() -> None:
    completion, writer = _Completion(), _Writer()
    reader = _Reader(_Texts(completion), writer)
    await _turns()
    completion.failure = ValueError("its engine")
    completion.add("a")
    assert b"".join(writer.written) == b"a(broken by its engine)"
    await asyncio.wait_for(reader.task, 10)


@async_test
async def test_replaced_connection_takes_no_events_and_its_task_ends() -> None:
    completion, writers = _Completion(), (_Writer(), _Writer())
    delivery = _Texts(completion)
    old = _Reader(delivery, writers[0])
    await _turns()
    completion.add("a")
    new = _Reader(delivery, writers[1])
    completion.add("b")
    await asyncio.wait_for(old.task, 10)
    await _turns()
    completion.add("c")
    assert writers[0].written == [b"a"] and not old.sent
    assert (new.sent, writers[1].written) == ([b"b"], [b"c"])
    new.task.cancel()


@async_test
async def test_long_work_is_cut_into_time_slices_that_the_task_continues() -> None:
    completion, writer = _Completion(), _Writer()
    reader = _Reader(_Texts(completion), writer)
    await _turns()
    n_texts = 100_000
    assert completion.add(*["x"] * n_texts), "a busy loop is not a slow client"
    assert 0 < sum(map(len, writer.written)) < n_texts
    for _ in range(10_000):
        if not completion.events:
            break
        await asyncio.sleep(0)
    assert sum(map(len, [*writer.written, *reader.sent])) == n_texts and len(reader.sent) > 1
    reader.task.cancel()


class _FirstAndLast(_Texts):
    """Texts have no frames."""

    def encode(self, event: CompletionEvent) -> bytes:
        return b"" if isinstance(event, Delta) else super().encode(event)


@async_test
async def test_events_without_frames_do_not_stall_a_stream_after_a_time_slice() -> None:
    completion, writer = _Completion(), _Writer()
    reader = _Reader(_FirstAndLast(completion), writer)
    await _turns()
    completion.add(*["x"] * 100_000, "end")
    assert completion.events and not writer.written
    await asyncio.wait_for(reader.task, 10)
    assert reader.sent == [b".END"]


class _BrokenChunks(_CompletionsResponder):
    """Fails to encode the text "bad"."""

    def _chunk(self, delta: Delta, finished: Finished | None = None) -> bytes:
        if delta.text == "bad":
            raise ValueError(delta.text)
        return super()._chunk(delta, finished)


@async_test
async def test_frames_encoded_before_an_error_are_sent_first() -> None:
    body: Any = SimpleNamespace(stream=True, stream_options=None, user=None, request_id=None, warnings=[])
    head = {"id": "r", "object": "o", "created": 1, "model": "m", "system_fingerprint": "f", "seed": 2}
    responder = _BrokenChunks(_handle(_Completion("a", "b", "bad", "c")), body, head)
    reader = _Reader(responder, None)
    await asyncio.wait_for(reader.task, 10)
    blocks = b"".join(reader.sent).decode().split("\n\n")
    assert blocks[3:] == ["data: [DONE]", ""]
    first, second, error = (json.loads(block.removeprefix("data: ")) for block in blocks[:3])
    assert [first["choices"][0]["text"], second["choices"][0]["text"]] == ["a", "b"]
    assert error["error"]["message"] == "broken by bad"
