"""Two crashes identify a poisoned request, and no other one is refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.engine_client.crash_suspects import CrashSuspects
from app.engine_client.restart_policy import TOKENS_TO_CLEAR
from app.generation.completion import MAX_BUFFERED
from tests.support.async_test import async_test
from tests.support.engine_pool import PoolHarness, expected_tokens


@given(
    n=st.integers(1, 12),
    engines=st.integers(1, 3),
    slots=st.integers(1, 12),
    fuse=st.integers(0, TOKENS_TO_CLEAR - 1),
    late=st.integers(0, 5),
)
@async_test
async def test_only_the_poisoned_request_is_refused_after_two_crashes(
    n: int, engines: int, slots: int, fuse: int, late: int
) -> None:
    """The poisoned request may arrive at any time, and may make progress in each engine process before the crash."""
    harness = PoolHarness(engines, slots=slots)
    for engine in harness.engines:
        engine.deadly, engine.fuse = f"r{n - 1}/0", fuse
    for number in range(n - 1):
        harness.submit((number,) * 8)
    harness.step(late)
    harness.submit((n,) * 8)
    for _ in range(250):
        if not any(stream.is_open for stream in harness.completions):
            break
        harness.step()
        for engine in harness.engines:
            if engine.ready is None:
                engine.load()
    *texts, victim = harness.texts()
    assert victim == "EngineFailed" and texts == [expected_tokens(stream) for stream in harness.completions[:-1]]
    assert sorted(engine.restarts for engine in harness.engines) == [*[0] * (engines - 1), 2]


@given(
    data=st.lists(st.sampled_from(["submit", "step", "step", "step", "disconnect", "kill"]), max_size=60),
    slots=st.integers(1, 5),
)
@async_test
async def test_external_crashes_with_progress_between_them_refuse_no_request(data: list[str], slots: int) -> None:
    harness, n_closed = PoolHarness(1, slots=slots), 0
    (engine,), (client,) = harness.engines, harness.pool.engines

    def let_all_progress() -> None:
        """Runs one suspect after the other, as far as there are slots."""
        harness.step((client.load + 1) * (TOKENS_TO_CLEAR + 1))

    for number, action in enumerate(data):
        if action == "submit":
            harness.submit((number,), max_tokens=MAX_BUFFERED - 1)
        elif action == "step":
            harness.step()
        elif action == "disconnect" and n_closed < len(harness.completions):
            harness.completions[n_closed].end()
            n_closed += 1
        elif action == "kill":
            let_all_progress()
            engine.crash()
            engine.load()
    let_all_progress()
    assert not client.n_suspects or slots < client.load
    assert all(stream.is_open for stream in harness.completions[n_closed:])


def test_suspects_run_one_by_one_in_order_and_keep_their_count_under_a_new_id() -> None:
    suspects, progress = CrashSuspects(), dict.fromkeys(["a", "b", "c", "c~2"], 0)

    def sent() -> str | None:
        suspects.update_trial(progress.__getitem__)
        return suspects.pop_next(progress.__getitem__)

    for name in ("a", "b", "c"):
        suspects.add(name, 0)
    assert sent() is None and suspects.on_crash(progress.__getitem__) == []
    assert (suspects.n_in_flight, suspects.n_suspects) == (0, 3)
    assert sent() == "a"
    progress["a"] += TOKENS_TO_CLEAR - 1
    assert sent() is None
    progress["a"] += 1
    assert sent() == "b"
    crash_count = suspects.crash_count("c")
    for name in ("b", "c"):
        suspects.remove(name)
    suspects.add_suspect("c~2", crash_count)
    assert sent() == "c~2", "a cancelled suspect makes way for the next one"
    assert suspects.on_crash(progress.__getitem__) == ["c~2"]
