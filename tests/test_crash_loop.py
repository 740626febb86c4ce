"""When an engine that crashes again and again is given up."""

from __future__ import annotations

from app.engine.crash_loop import WINDOW_SECONDS, CrashLoop


def _verdicts(*crashes: tuple[bool, bool], pause: float = 1.0) -> list[bool]:
    """(delivered, explained) of each crash."""
    loop = CrashLoop()
    return [
        loop.record(number * pause, delivered=delivered, explained=explained)
        for number, (delivered, explained) in enumerate(crashes)
    ]


def test_three_crashes_in_a_row_are_too_many() -> None:
    assert _verdicts((False, False), (False, False), (False, False)) == [False, False, True]
    assert _verdicts((True, False), (False, False), (False, False)) == [False, False, True]


def test_crashes_with_a_token_between_them_never_are() -> None:
    assert not any(_verdicts(*[(True, False)] * 50))
    assert not any(_verdicts(*[(True, False), (False, False)] * 20))


def test_a_poisoned_request_does_not_end_the_service() -> None:
    assert not any(_verdicts((False, False), (False, True)))
    assert not any(_verdicts(*[(True, False), (False, True)] * 20))


def test_an_engine_that_refuses_everybody_is_given_up() -> None:
    assert _verdicts((True, False), (False, True), (False, True), (False, True)) == [False, False, False, True]


def test_old_crashes_do_not_count() -> None:
    assert not any(_verdicts(*[(False, False)] * 20, pause=WINDOW_SECONDS / 2))
    assert any(_verdicts(*[(False, False)] * 3, pause=WINDOW_SECONDS / 2 - 1))
