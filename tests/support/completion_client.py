"""Minimal client of the completion endpoints."""

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
    """Parses a stream, and checks that every block is `id`, `event` and one line of `data`, or a comment."""
    events = EventParser().feed(body.encode("ascii"))
    blocks = [
        f"id: {event.id}\nevent: {event.name}\ndata: {event.data.decode()}" if event.name else event.data.decode()
        for event in events
    ]
    assert "".join(f"{block}\n\n" for block in blocks) == body
    return [Event(event.id, event.name, json.loads(event.data)) for event in events if event.name]


def stream(url: str, **body: Any) -> list[Event]:
    """Streams a completion from /complete; returns all events."""
    response = httpx.post(f"{url}/complete", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return parse_events(response.text)


def fetch_completion(url: str, **body: Any) -> dict[str, Any]:
    """Requests a completion from /complete without streaming."""
    response = httpx.post(f"{url}/complete", json={**body, "stream": False}, timeout=60)
    assert response.status_code == 200, response.text
    completion: dict[str, Any] = response.json()
    return completion


def joined_text(events: list[Event]) -> str:
    """The concatenated text of token events."""
    return "".join(event.data["text"] for event in events if event.name == "token")


def stream_chunks(url: str, **body: Any) -> list[dict[str, Any]]:
    """Streams from /v1/completions; checks that there are only data lines and a final `[DONE]`; returns the chunks."""
    response = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}, timeout=60)
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: {") and "\n" not in block for block in blocks[:-2])
    return [json.loads(block[6:]) for block in blocks[:-2]]
