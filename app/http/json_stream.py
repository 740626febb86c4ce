"""Long JSON responses, encoded while they are sent, so that a slow client takes little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any, Generic, TypeVar, get_args

import msgspec
from pydantic import GetCoreSchemaHandler
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.common.time_slice import TimeSlice
from app.http.disconnect import until_disconnect

_T = TypeVar("_T")


class LazyArray(Generic[_T]):
    """Lazy JSON array: `batches` yields its elements, some at a time, while the response is sent."""

    def __init__(self, batches: Callable[[], Iterator[list[_T]]]) -> None:
        self._batches = batches

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(list[get_args(source)[0]])  # type: ignore[misc]

    def encoded(self) -> Iterator[bytes]:
        """The JSON in parts."""
        separator = b"["
        for batch in self._batches():
            if batch:
                yield separator + msgspec.json.encode(batch)[1:-1]
                separator = b","
        yield b"[]" if separator == b"[" else b"]"


Array = list[_T] | LazyArray[_T]
"""Annotation of a field whose value is a list in streams, and lazy in whole responses."""


class LazyString:
    """Lazy JSON string: `parts` yields its parts while the response is sent."""

    def __init__(self, parts: Callable[[], Iterator[str]]) -> None:
        self._parts = parts

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(str)

    def encoded(self) -> Iterator[bytes]:
        """The JSON in parts."""
        yield b'"'
        for part in self._parts():
            yield msgspec.json.encode(part)[1:-1]
        yield b'"'


def encode_lazily(value: Any) -> Iterator[bytes]:
    """The JSON of a value, whose lazy arrays and strings are computed while this is read; keeps no reference to it."""
    lazy: list[LazyArray[Any] | LazyString] = []

    def defer(item: LazyArray[Any] | LazyString) -> msgspec.Raw:
        lazy.append(item)
        return msgspec.Raw(b"\0")  # JSON itself never has this byte

    first, *others = msgspec.json.encode(value, enc_hook=defer).split(b"\0")
    return chain([first], *[chain(item.encoded(), [text]) for item, text in zip(lazy, others, strict=True)])


_CHUNK_BYTES = 16 << 10


class JsonStream(Response):
    """Sends `content`: if short with a Content-Length, if long in chunks, and `time_slice` yields between them.

    Calls `close` exactly once: when the content is in the socket buffer, before a long response's end is sent, or when
    the client has disconnected.
    """

    media_type = "application/json"

    def __init__(
        self,
        content: Any,
        headers: Mapping[str, str],
        time_slice: TimeSlice,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._parts = encode_lazily(content)
        self._time_slice = time_slice
        self._on_close = ExitStack()
        self._on_close.callback(close)

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response at the client's pace."""
        try:
            first, is_whole = _chunk(self._parts)
            if is_whole:
                self.headers["content-length"] = str(len(first))
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if is_whole:
                await send({"type": "http.response.body", "body": first, "more_body": False})
            else:
                await until_disconnect(self._send_chunks(first, send), receive)
        finally:
            self._on_close.close()

    async def _send_chunks(self, chunk: bytes, send: Send) -> None:
        is_last = False
        while True:
            # Returns once the previous chunk is in the socket buffer.
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await self._time_slice.pause_if_due()
            if is_last:
                break
            chunk, is_last = _chunk(self._parts)
        self._on_close.close()  # before the client can send its next request, which needs this one's slot
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _chunk(parts: Iterator[bytes]) -> tuple[bytes, bool]:
    """The next bytes of a response, and whether they are the last."""
    chunk = bytearray()
    for part in parts:
        chunk += part
        if len(chunk) >= _CHUNK_BYTES:
            return bytes(chunk), False
    return bytes(chunk), True
