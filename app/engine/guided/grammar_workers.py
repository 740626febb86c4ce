"""Thread pool for the host work of guided decoding: compiling grammars and computing token masks off the step.

Threads suffice: llguidance releases the GIL while it compiles and while it computes a mask. It holds the GIL while it
consumes a token, which the limits in app/common/llguidance_adapter.py bound to about a millisecond.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from app.common.fair_turns import FairTurns
from app.common.operating_system import lower_priority

_NICE = 19
"""The lowest priority. On two cores whose streams want both, 31 costly grammars of another key made the p99 between a
stream's tokens 26 ms so, and 45 ms with a third of a step's share (2026-11-23); rows whose masks are late sit out."""
_MIN_THREADS = 3


@dataclass(slots=True, eq=False)
class Job:
    """Work for a thread of the pool; owned by the pool from submit() until it is done."""

    tenant: str
    work: Callable[[], None]
    is_long: bool = False
    is_queued: bool = False
    has_started: bool = False
    done: bool = False
    error: BaseException | None = None
    """What `work` raised."""


@dataclass(slots=True)
class _TenantJobs:
    """One tenant's jobs that wait, and how many run."""

    masks: deque[Job] = field(default_factory=deque)
    compiles: deque[Job] = field(default_factory=deque)
    running: int = 0

    @property
    def are_waiting(self) -> bool:
        return bool(self.masks or self.compiles)


class GrammarWorkers:
    """Runs jobs in fair turns of tenants by CPU time, which is known when a job is done.

    A job cannot be interrupted, so two caps keep one from delaying all others: a tenant occupies at most all threads
    but one, and long jobs (compiles) at most all but two.
    """

    def __init__(self, threads: int | None = None) -> None:
        """Threads start with the first job; by default one per two cores, and at least three."""
        self._n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._n_threads = threads or max(_MIN_THREADS, self._n_cores // 2)
        assert self._n_threads >= _MIN_THREADS
        self._jobs_by_tenant: dict[str, _TenantJobs] = {}
        """Of tenants with jobs that wait or run."""
        self._turns = FairTurns[str]()
        self._n_long = 0
        self._is_running = False
        lock = threading.Lock()
        self._queued, self._finished = threading.Condition(lock), threading.Condition(lock)

    @property
    def n_spare_cores(self) -> int:
        """Cores beyond two, which the forward pass keeps busy in any case."""
        return max(0, self._n_cores - 2)

    def submit(self, job: Job) -> None:
        """Queues a job, once; jobs of one tenant and length start in the order in which they were submitted."""
        if job.is_queued or job.has_started:
            return
        job.is_queued = True
        with self._queued:
            tenant_jobs = self._jobs_by_tenant.setdefault(job.tenant, _TenantJobs())
            if not tenant_jobs.are_waiting:
                self._turns.wait(job.tenant)
            (tenant_jobs.compiles if job.is_long else tenant_jobs.masks).append(job)
            self._queued.notify()
        if not self._is_running:
            self._start()

    def cancel(self, job: Job) -> bool:
        """Keeps threads from starting a job; False if one has started it. A running job runs to its end."""
        with self._queued:
            if job.has_started:
                return False
            job.has_started = True
            if job.is_queued:
                tenant_jobs = self._jobs_by_tenant[job.tenant]
                (tenant_jobs.compiles if job.is_long else tenant_jobs.masks).remove(job)
                if not tenant_jobs.are_waiting:
                    self._turns.leave(job.tenant)
                self._remove_if_idle(job.tenant, tenant_jobs)
            return True

    def run_here(self, job: Job) -> None:
        """Runs a job in the calling thread, unless another thread has started it."""
        if self.cancel(job):
            _execute(job)
            job.done = True

    def wait(self, jobs: Iterable[Job], seconds: float) -> None:
        """Returns when all `jobs` are done, or after `seconds`."""
        waiting = [job for job in jobs if not job.done]
        with self._finished:
            self._finished.wait_for(lambda: all(job.done for job in waiting), seconds)

    def _start(self) -> None:
        self._is_running = True
        for number in range(self._n_threads):
            threading.Thread(target=self._run, name=f"grammar-{number}", daemon=True).start()

    def _run(self) -> None:
        lower_priority(_NICE)  # the forward pass goes first if cores are scarce
        while True:
            with self._queued:
                while (job := self._take()) is None:
                    self._queued.wait()
            self._finish(job, _execute(job))
            del job  # a waiting thread must not keep it alive

    def _take(self) -> Job | None:
        """Returns the next job, or None if none may run now; called with the lock held."""
        may_compile = self._n_long < self._n_threads - 2
        for tenant in self._turns:
            tenant_jobs = self._jobs_by_tenant[tenant]
            pending = tenant_jobs.masks or (tenant_jobs.compiles if may_compile else None)
            if pending and tenant_jobs.running < self._n_threads - 1:
                job = pending.popleft()
                job.has_started = True
                tenant_jobs.running += 1
                self._n_long += job.is_long
                self._turns.begin(tenant)
                if tenant_jobs.are_waiting:
                    self._turns.wait(tenant)
                return job
        return None

    def _finish(self, job: Job, seconds: float) -> None:
        with self._queued:
            tenant_jobs = self._jobs_by_tenant[job.tenant]
            tenant_jobs.running -= 1
            self._turns.end(job.tenant, seconds)
            self._remove_if_idle(job.tenant, tenant_jobs)
            self._n_long -= job.is_long
            job.done = True
            self._finished.notify_all()
            self._queued.notify()  # a cap may have kept another job from starting

    def _remove_if_idle(self, tenant: str, tenant_jobs: _TenantJobs) -> None:
        if not (tenant_jobs.are_waiting or tenant_jobs.running):
            del self._jobs_by_tenant[tenant]


def _execute(job: Job) -> float:
    """Runs a job and returns the CPU seconds that it took."""
    started = time.thread_time()
    try:
        job.work()
    except BaseException as error:  # a panic in Rust is not an Exception
        job.error = error
    return time.thread_time() - started
