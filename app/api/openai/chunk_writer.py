"""Data-only frames of a stream: what is the same in all of them is written once. Knows no job and no clock."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

NOT_ENDED = '"logprobs": null, "finish_reason": null, "stop_reason": null}'
"""The end of a choice that goes on and was not asked for log-probabilities."""


def frame(data: Mapping[str, Any]) -> bytes:
    """One frame. The JSON is ASCII: some clients take U+2028 for the end of a line."""
    return f"data: {json.dumps(data)}\n\n".encode("ascii")


class ChunkWriter:
    """Writes chunks that begin with `head` and end with `extra`, each with one choice between them."""

    def __init__(self, head: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self._before = f'data: {json.dumps(head)[:-1]}, "choices": ['
        self._behind = "]" + "".join(f", {json.dumps(name)}: {json.dumps(value)}" for name, value in extra.items())

    def chunk(self, choice: str, more: str = "") -> bytes:
        """A chunk with this choice, which is JSON already; `more` stands at its end, comma first."""
        return f"{self._before}{choice}{self._behind}{more}}}\n\n".encode("ascii")
