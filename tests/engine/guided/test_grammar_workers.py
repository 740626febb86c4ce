"""The pool for grammar work: turns by key, limits, and jobs that are cancelled or fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from app.engine.guided.grammar_workers import GrammarWorkers, Job


def _spin(seconds: float) -> None:
    """Uses this much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class _Order:
    """Jobs that record the order in which they ran, in a pool whose threads are busy until open()."""

    def __init__(self) -> None:
        self.pool = GrammarWorkers(3)
        self.ran: list[str] = []
        self.jobs: list[Job] = []
        self._gate = threading.Event()
        for number in range(3):
            self._add(f"busy {number}", self._gate.wait)
        while any(not job.has_started for job in self.jobs):
            time.sleep(0.001)

    def add(self, name: str, seconds: float = 0.0) -> Job:
        """A job of the key before the slash."""
        return self._add(name.partition("/")[0], lambda: (self.ran.append(name), _spin(seconds)))

    def open(self) -> list[str]:
        self._gate.set()
        self.pool.wait(self.jobs, 60)
        assert all(job.done for job in self.jobs)
        return self.ran

    def _add(self, tenant: str, work: Callable[[], object]) -> Job:
        job = Job(tenant, lambda: (work(), None)[1])
        self.jobs.append(job)
        self.pool.submit(job)
        return job


def test_key_with_the_least_used_time_goes_first() -> None:
    order = _Order()
    for number in range(30):
        order.add(f"x/{number}", 0.01)
    order.add("y/1")
    order.add("x/last")
    ran = order.open()
    assert ran.index("y/1") < 12 and ran.index("x/last") > 25, ran


def _most_at_once(count: int, tenant: Callable[[int], str], *, is_long: bool) -> int:
    pool, lock, now, most = GrammarWorkers(4), threading.Lock(), 0, 0

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1

    jobs = [Job(tenant(number), work, is_long=is_long) for number in range(count)]
    for job in jobs:
        pool.submit(job)
    pool.wait(jobs, 60)
    return most


def test_one_key_leaves_one_thread_free_and_compilation_leaves_two() -> None:
    assert _most_at_once(12, lambda _: "x", is_long=False) == 3
    assert _most_at_once(12, str, is_long=True) == 2
    assert _most_at_once(12, str, is_long=False) == 4, "positive control"


def test_queued_job_can_be_cancelled_or_run_by_the_caller() -> None:
    order = _Order()
    dropped, here = order.add("x/dropped"), order.add("x/here")
    order.add("x/kept")
    assert order.pool.cancel(dropped) and not order.pool.cancel(order.jobs[0])
    order.jobs.remove(dropped)
    order.pool.run_here(here)
    assert here.done and order.ran == ["x/here"]
    assert order.open() == ["x/here", "x/kept"]


def test_exception_of_a_job_is_stored_and_the_thread_continues() -> None:
    pool = GrammarWorkers(3)

    def fail() -> None:
        raise KeyboardInterrupt

    failed, fine = [Job("x", fail) for _ in range(9)], Job("x", lambda: None)
    for job in (*failed, fine):
        pool.submit(job)
    pool.wait([*failed, fine], 60)
    assert all(isinstance(job.error, KeyboardInterrupt) for job in failed) and fine.done and fine.error is None
