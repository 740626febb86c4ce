"""The sandboxed worker: results, limits, and complete cleanup."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing
from pathlib import Path

import pytest

from app.access.worker_turns import Busy, WorkAccount
from app.common.errors import EngineFailed
from app.sandbox.sandbox import Sandbox, SandboxError, SandboxPool
from tests.support import ROOT
from tests.support.async_test import async_test


@pytest.fixture(autouse=True)
def _find_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("INKSTREAM_SECRET", "a key")


class Pool(SandboxPool):
    """A pool with the questions of one tenant."""

    def __init__(self, seconds: float = 60.0) -> None:
        super().__init__("tests.support.sandbox_echo", seconds=seconds, max_jobs=6)

    async def aclose(self) -> None:
        """Closes the pool; contextlib.aclosing() calls it."""
        self.close()

    async def put(self, question: bytes) -> bytes:
        """Sends a question; returns the answer."""
        return await self.call(question, WorkAccount())

    def allow(self, seconds: float) -> None:
        """Sets the time limit of the next questions; a low limit for all would fail on a busy machine."""
        self._seconds = seconds


@async_test
async def test_one_child_answers_successive_questions_of_any_size() -> None:
    async with aclosing(Pool()) as pool:
        assert not pool.pids
        for question in (b"", b"a", b"b" * 300_000):
            assert await pool.put(question) == question
        first = set(pool.pids)
        assert await asyncio.gather(*(pool.put(bytes([i])) for i in range(3))) == [b"\0", b"\1", b"\2"]
        assert await pool.put(b"print") == b"print", "output printed by the child must not count as an answer"
        assert first <= set(pool.pids), "no child was replaced"
        assert b"INKSTREAM" not in await pool.put(b"environment")


@async_test
async def test_child_that_failed_to_start_is_restarted_while_another_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = [EngineFailed("the first one does not start")]
    start = Sandbox.start

    def fails_once(sandbox: Sandbox) -> None:
        if failures:
            raise failures.pop()
        start(sandbox)

    monkeypatch.setattr(Sandbox, "start", fails_once)
    async with aclosing(Pool()) as pool:
        with pytest.raises(EngineFailed, match="the first one"):
            await pool.put(b"a")
        while not pool.pids:  # noqa: ASYNC110 - another child starts meanwhile
            await asyncio.sleep(0.01)
        assert await pool.put(b"a") == b"a"


@async_test
async def test_endless_question_is_killed_and_the_next_one_answered() -> None:
    async with aclosing(Pool()) as pool:
        assert int(await pool.put(b"pid")) in pool.pids
        while len(before := set(pool.pids)) < 2:  # noqa: ASYNC110 - another child starts meanwhile
            await asyncio.sleep(0.01)
        pool.allow(0.5)
        with pytest.raises(SandboxError, match=r"more than 0\.5 seconds"):
            await pool.put(b"spin")
        (killed,) = before - set(pool.pids)
        with pytest.raises(ProcessLookupError):
            os.kill(killed, 0)
        pool.allow(60.0)
        assert int(await pool.put(b"pid")) in pool.pids


@pytest.mark.parametrize("question", [b"exit 3", b"grow 16777217"])
@async_test
async def test_child_that_dies_or_exceeds_the_answer_limit_is_an_error(question: bytes) -> None:
    async with aclosing(Pool()) as pool:
        with pytest.raises(SandboxError):
            await pool.put(question)
        assert await pool.put(b"grow 16777216") == b"x" * 16_777_216


@async_test
async def test_child_has_limited_memory_and_cannot_write_files(tmp_path: Path) -> None:
    async with aclosing(Pool()) as pool:
        assert await pool.put(b"hold 50000000") == b"50000000"
        assert await pool.put(b"hold 300000000") == b"MemoryError"
        assert await pool.put(f"write {tmp_path}/x".encode()) == b"OSError"


@async_test
async def test_abandoned_answer_is_not_mistaken_for_the_next_one() -> None:
    async with aclosing(Pool()) as pool:
        await pool.put(b"hello")
        asking = asyncio.create_task(pool.put(b"sleep 10"))
        await asyncio.sleep(0.05)
        asking.cancel()
        assert await pool.put(b"next") == b"next"


@async_test
async def test_number_of_waiting_questions_is_bounded() -> None:
    async with aclosing(Pool()) as pool:
        open_ones = [asyncio.create_task(pool.put(b"sleep 0.2")) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await pool.put(b"hello")
        await asyncio.gather(*open_ones)
        assert await pool.put(b"hello") == b"hello"


def test_child_ends_with_or_soon_after_its_parent() -> None:
    """A waiting child ends with its pipe; a spinning one is ended by its alarm."""

    async def pid_of_a_child(question: bytes) -> int:
        pool = Pool(seconds=0.2)
        pool.allow(60.0)  # the child has the shorter limit
        await pool.put(b"hello")
        child = pool._sandbox._idle[0]
        pid, process = child.pid, child._process
        assert pid and process and process.stdin
        process.stdin.write(len(question).to_bytes(4, "little") + question)
        process.stdin.close()  # what a child reads when its parent is killed
        code = await asyncio.to_thread(process.wait, 60)
        assert code == (0 if question == b"hello" else -signal.SIGALRM)
        pool.close()
        return pid

    for question in (b"hello", b"spin"):
        with pytest.raises(ProcessLookupError):
            os.kill(asyncio.run(pid_of_a_child(question)), 0)


def _state(pid: int) -> str:
    """State of a process in /proc: Z for a zombie; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


@async_test
async def test_killed_idle_children_do_not_stay_zombies() -> None:
    async with aclosing(Pool()) as pool:
        await pool.put(b"")
        pids = list(pool.pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for _ in range(200):
            if not any(map(_state, pids)):
                break
            await asyncio.sleep(0.02)
        assert [_state(pid) for pid in pids] == [""] * len(pids)
        assert await pool.put(b"again") == b"again"


@async_test
async def test_stop_signals_do_not_end_children_at_any_moment() -> None:
    async with aclosing(Pool()) as pool:
        first = asyncio.ensure_future(pool.put(b"first"))
        for _ in range(5000):
            if pool.pids:
                break
            await asyncio.sleep(0.001)
        (pid, *_) = pool.pids  # its imports have only begun
        for _ in range(3):
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                os.kill(pid, number)
            await asyncio.sleep(0.02)
        assert await first == b"first"
        assert pid in pool.pids and _state(pid) not in ("", "Z")
    assert _state(pid) == ""
