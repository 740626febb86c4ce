"""Restart policy: when the service gives up on an engine that keeps crashing."""

from __future__ import annotations

from app.engine_client.crash_recovery import MAX_FORGIVEN, WINDOW_SECONDS, RestartPolicy


def _verdicts(*crashes: tuple[bool, bool], pause: float = 1.0) -> list[bool]:
    """(delivered, explained) of each crash."""
    loop = RestartPolicy()
    return [
        loop.record(number * pause, delivered=delivered, is_refused=explained)
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


def _of_bad_requests(count: int, pause: float, *, is_proven: bool = True) -> list[bool]:
    """Verdicts on two crashes of each; the engine answers the canary between them, and no other request arrives."""
    loop, now, verdicts = RestartPolicy(), 0.0, []
    for number in range(count):
        for explained in (False, True):
            now += pause / 2
            proven = is_proven and number > 0 and not explained
            verdicts.append(loop.record(now, delivered=False, is_refused=explained, canary_answered=proven))
    return verdicts


def test_bad_requests_do_not_end_an_otherwise_idle_service() -> None:
    assert not any(_of_bad_requests(MAX_FORGIVEN, 1.0))
    assert _of_bad_requests(2, 1.0, is_proven=False)[-1], "an engine that cannot even answer the probe"


def test_an_engine_that_does_nothing_but_answer_probes_is_given_up() -> None:
    assert _of_bad_requests(MAX_FORGIVEN + 1, 1.0).index(True) == 2 * MAX_FORGIVEN + 1
    assert not any(_of_bad_requests(50, 2 * WINDOW_SECONDS / MAX_FORGIVEN))


def test_tokens_for_any_client_forgive_all() -> None:
    loop = RestartPolicy()
    for number in range(5 * MAX_FORGIVEN):
        assert not loop.record(number, delivered=True, is_refused=False)
        assert not loop.record(number, delivered=False, is_refused=True)
