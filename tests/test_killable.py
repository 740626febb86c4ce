"""The child that may be killed: answers, limits, and that nothing of it stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from app.killable import Busy, KillableHelper, Killed

TESTS = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def _find_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", TESTS)
    monkeypatch.setenv("INKSTREAM_SECRET", "a key")


def _with(use: Callable[[KillableHelper], Awaitable[None]], seconds: float = 60.0) -> None:
    async def run() -> None:
        helper = KillableHelper("confined_echo", seconds=seconds, most_waiting=3)
        try:
            await use(helper)
        finally:
            await helper.close()

    asyncio.run(run())


def test_one_child_answers_question_after_question_of_any_size() -> None:
    async def use(helper: KillableHelper) -> None:
        assert helper.pid is None
        for question in (b"", b"a", b"b" * 300_000):
            assert await helper.ask(question) == question
        first = helper.pid
        assert await asyncio.gather(*(helper.ask(bytes([i])) for i in range(3))) == [b"\0", b"\1", b"\2"]
        assert await helper.ask(b"print") == b"print", "what the child prints is no answer"
        assert helper.pid == first
        assert b"INKSTREAM" not in await helper.ask(b"environment")

    _with(use)


def test_a_question_that_never_ends_is_killed_and_the_next_one_answered() -> None:
    async def use(helper: KillableHelper) -> None:
        await helper.ask(b"hello")
        first = helper.pid
        assert first
        helper._seconds = 0.5  # for this question alone: the others may be late on a machine that is busy
        with pytest.raises(Killed, match=r"more than 0\.5 seconds"):
            await helper.ask(b"spin")
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        helper._seconds = 60.0
        assert await helper.ask(b"hello") == b"hello"
        assert helper.pid != first

    _with(use)


@pytest.mark.parametrize("question", [b"exit 3", b"grow 100001"])
def test_a_child_that_dies_or_says_too_much_gives_no_answer(question: bytes) -> None:
    async def use(helper: KillableHelper) -> None:
        with pytest.raises(Killed):
            await helper.ask(question, most_bytes=100_000)
        assert helper.pid is None
        assert await helper.ask(b"grow 100000", most_bytes=100_000) == b"x" * 100_000

    _with(use)


def test_a_child_gets_no_more_memory_and_writes_no_files(tmp_path: Path) -> None:
    async def use(helper: KillableHelper) -> None:
        assert await helper.ask(b"hold 50000000") == b"50000000"
        assert await helper.ask(b"hold 300000000") == b"MemoryError"
        assert await helper.ask(f"write {tmp_path}/x".encode()) == b"OSError"

    _with(use)


def test_an_answer_nobody_waits_for_is_not_taken_for_the_next_ones() -> None:
    async def use(helper: KillableHelper) -> None:
        await helper.ask(b"hello")
        asking = asyncio.create_task(helper.ask(b"sleep 10"))
        await asyncio.sleep(0.05)
        asking.cancel()
        assert await helper.ask(b"next") == b"next"

    _with(use)


def test_no_more_questions_wait_than_may() -> None:
    async def use(helper: KillableHelper) -> None:
        open_ones = [asyncio.create_task(helper.ask(b"sleep 0.2")) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await helper.ask(b"hello")
        await asyncio.gather(*open_ones)
        assert await helper.ask(b"hello") == b"hello"

    _with(use)


def test_a_child_ends_with_its_parent_or_shortly_after() -> None:
    """The pipe's end is enough for a child that waits; one that spins has its alarm."""

    async def pid_of_a_child(question: bytes) -> int:
        helper = KillableHelper("confined_echo", seconds=0.2)
        helper._seconds = 60.0  # the child has been told the shorter one
        await helper.ask(b"hello")
        pid, process = helper.pid, helper._process
        assert pid and process and process.stdin
        process.stdin.write(len(question).to_bytes(4, "little") + question)
        process.stdin.close()  # all that is left of a parent that was killed
        async with asyncio.timeout(60):
            code = await process.wait()
        assert code == (0 if question == b"hello" else -signal.SIGALRM)
        return pid

    for question in (b"hello", b"spin"):
        with pytest.raises(ProcessLookupError):
            os.kill(asyncio.run(pid_of_a_child(question)), 0)
