"""Concurrent clients of every kind, and the outcome of each."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

BODY = {"prompt": "Once upon a time", "max_tokens": 80, "ignore_eos": True}
STREAMS, OTHERS, WHOLES = 14, 4, 6


@dataclass(slots=True)
class Visit:
    """Mutable, filled by one task."""

    kind: str
    seed: int
    text: str = ""
    first_text: float | None = None
    """Arrival time of the first text, or of a whole answer."""
    end: str = ""
    """done, error, or the fault that a client must never see."""
    numbers: list[int] = field(default_factory=list)
    """Numbers of the events."""

    async def make(self, client: httpx.AsyncClient) -> None:
        """Sends the request and reads to the end."""
        body = {**BODY, "seed": self.seed}
        try:
            if self.kind == "whole":
                await self._whole(client, {**body, "stream": False})
            elif self.kind == "stream":
                await self._lines(client, "/complete", body)
            else:
                await self._lines(client, "/v1/completions", {**body, "stream": True})
        except (httpx.HTTPError, KeyError, ValueError) as fault:
            self.end = repr(fault)

    async def _whole(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        response = await client.post("/complete", json=body)
        answer = response.json()
        if response.status_code != 200:
            self.end = "error" if answer["error"]["type"] == "unavailable_error" else response.text
            return
        self._add(answer["choices"][0]["text"])
        self.end = "done"

    async def _lines(self, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        name = ""
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                answer = json.loads(await response.aread())
                self.end = "error" if answer["error"]["type"] == "unavailable_error" else str(answer)
                return
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    self.numbers.append(int(line.rpartition(":")[2]))
                elif line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    self._data(name, line.removeprefix("data: "))

    def _data(self, name: str, data: str) -> None:
        if data == "[DONE]":
            self.end = self.end or "done"
        elif '"error":' in data[:20]:
            self.end = "error"
        elif name == "done":
            self.end = "done"
        elif name == "token":
            self._add(json.loads(data)["text"])
        elif not name:
            self._add(json.loads(data)["choices"][0]["text"])

    def _add(self, text: str) -> None:
        self.text += text
        self.first_text = self.first_text or time.monotonic()


class Clients:
    """All clients, in a thread of their own."""

    def __init__(self, url: str) -> None:
        kinds = ["stream"] * STREAMS + ["v1"] * OTHERS + ["whole"] * WHOLES
        self.visits = [Visit(kind, seed) for seed, kind in enumerate(kinds)]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._visit(url)))
        self._thread.start()

    @property
    def streaming(self) -> int:
        """Streams that have some text by now, and not all of it."""
        return sum(1 for visit in self.visits if visit.text and not visit.end)

    def join(self, seconds: float) -> None:
        """Raises AssertionError if a client still waits after `seconds`."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), [visit for visit in self.visits if not visit.end]

    async def _visit(self, url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=180) as client:
            await asyncio.gather(*[visit.make(client) for visit in self.visits])
