"""An engine that keeps crashing is given up; bad requests alone do not end the service."""

from __future__ import annotations

import pytest

from app.engine_client.restart_policy import MAX_FORGIVEN, WINDOW_SECONDS, RestartPolicy

_BAD_REQUEST = "cr"
"""Two crashes of one request; the engine that the first one ended had answered the canary request."""


@pytest.mark.parametrize(
    ("crashes", "pause", "stops_at"),
    [
        ("...", 1.0, 2),
        ("d..", 1.0, 2),
        ("d" * 50, 1.0, None),
        ("d." * 20, 1.0, None),
        ("." * 20, WINDOW_SECONDS / 2, None),
        ("...", WINDOW_SECONDS / 2 - 1, 2),
        ("dr" * 5 * MAX_FORGIVEN, 1.0, None),  # tokens for any client reset the count
        ("drrr", 1.0, 3),  # it refuses every request
        (".r.r", 1.0, 3),  # it fails even the canary request
        (".r" + _BAD_REQUEST * (MAX_FORGIVEN - 1), 0.5, None),
        (".r" + _BAD_REQUEST * MAX_FORGIVEN, 0.5, 2 * MAX_FORGIVEN + 1),  # it completes only the canary request
        (".r" + _BAD_REQUEST * 50, WINDOW_SECONDS / MAX_FORGIVEN, None),
    ],
)
def test_engine_is_given_up_if_it_crashes_without_serving_clients(
    crashes: str, pause: float, stops_at: int | None
) -> None:
    """A crash: d after tokens for clients, c after a completed canary request, r when a request is refused for it."""
    policy = RestartPolicy()
    verdicts = [
        policy.record(number * pause, delivered=one == "d", is_refused=one == "r", canary_answered=one == "c")
        for number, one in enumerate(crashes)
    ]
    assert next((number for number, is_over in enumerate(verdicts) if is_over), None) == stops_at
