"""OpenAI streams with an error in the middle of one write."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from types import SimpleNamespace
from typing import Any

from app.api.openai.responder import Responder
from app.generation.request import Delta
from app.http.errors import ApiError


class _Texts(Responder):
    """Cannot write the text "bad"."""

    def _encode_text_choice(self, index: int, text: str) -> str:
        if text == "bad":
            raise ValueError(text)
        return json.dumps({"index": index, "text": text})


class _Completion:
    """A session whose events are available at once and which never ends."""

    is_done = False

    def __init__(self, *texts: str) -> None:
        self._events = deque(Delta(0, text) for text in texts)

    @property
    def has_event(self) -> bool:
        return bool(self._events)

    async def wait_event(self, _consume: object) -> bool:
        return True

    def next_event(self) -> Delta:
        return self._events.popleft()


def test_what_was_written_before_an_error_is_sent_before_it() -> None:
    handle: Any = SimpleNamespace(
        name="r",
        session=_Completion("a", "b", "bad", "c"),
        admitted=SimpleNamespace(truncated=False),
        record_event=lambda _events: None,
        on_error=lambda error: ApiError(500, f"broken by {error}"),
    )
    body: Any = SimpleNamespace(stream=True, stream_options=None, user=None, request_id=None, warnings=[])

    head = {"id": "r", "object": "o", "created": 1, "model": "m", "system_fingerprint": "f", "seed": 2}

    async def read() -> bytes:
        return b"".join([frames async for frames in _Texts(handle, body, head)._frames(None)])

    blocks = asyncio.run(read()).decode().split("\n\n")
    assert blocks[3:] == ["data: [DONE]", ""]
    first, second, error = (json.loads(block.removeprefix("data: ")) for block in blocks[:3])
    assert [first["choices"][0]["text"], second["choices"][0]["text"]] == ["a", "b"]
    assert error["error"]["message"] == "broken by bad"
