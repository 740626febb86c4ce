"""Small helpers that speak to the service as clients do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

from app.http.sse import EventParser


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event."""

    id: str
    name: str
    data: dict[str, Any]


def parse_events(body: str) -> list[Event]:
    """Strict: every block is `id`, `event`, one line of `data`, or a comment."""
    events = EventParser().feed(body.encode("ascii"))
    blocks = [
        f"id: {event.id}\nevent: {event.name}\ndata: {event.data.decode()}" if event.name else event.data.decode()
        for event in events
    ]
    assert "".join(f"{block}\n\n" for block in blocks) == body
    return [Event(event.id, event.name, json.loads(event.data)) for event in events if event.name]


def stream(url: str, **body: Any) -> list[Event]:
    """All events of a streamed completion."""
    response = httpx.post(f"{url}/complete", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return parse_events(response.text)


def whole(url: str, **body: Any) -> dict[str, Any]:
    """A completion in one object."""
    response = httpx.post(f"{url}/complete", json={**body, "stream": False}, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text_of(events: list[Event]) -> str:
    """The text of a stream."""
    return "".join(event.data["text"] for event in events if event.name == "token")


def chunks(url: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream of /v1/completions: strictly nothing but data lines, with `[DONE]` at the end."""
    response = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}, timeout=60)
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: {") and "\n" not in block for block in blocks[:-2])
    return [json.loads(block[6:]) for block in blocks[:-2]]
