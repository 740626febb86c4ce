"""Thread pool for the host work of guided decoding: compiling grammars and computing token masks off the step.

A thread has to be enough: llguidance releases the GIL while it compiles and while it computes a mask (it keeps it while
it consumes a token, which the limits in app/common/llguidance_adapter.py bound to about a millisecond).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_NICE = 5
"""A third of the share that a thread of the forward pass gets of a core that both want."""
_MIN_THREADS = 3
_MOST_IDLE_TENANTS = 256


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
class _Lane:
    """A tenant's jobs and the CPU seconds that it has used, in the virtual time of the pool."""

    masks: deque[Job] = field(default_factory=deque)
    compiles: deque[Job] = field(default_factory=deque)
    seconds: float = 0.0
    running: int = 0

    @property
    def is_idle(self) -> bool:
        return not (self.masks or self.compiles or self.running)


class GrammarWorkers:
    """Runs jobs in start-time fair order by tenant: the tenant that has used the least CPU time goes first.

    A job cannot be interrupted, so two caps keep one from delaying all others: a tenant occupies at most all threads
    but one, and long jobs (compiles) at most all but two.
    """

    def __init__(self, threads: int | None = None) -> None:
        """Threads start with the first job; by default one for every two cores, and at least three."""
        self._n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._n_threads = threads or max(_MIN_THREADS, self._n_cores // 2)
        assert self._n_threads >= _MIN_THREADS
        self._lanes: dict[str, _Lane] = {}
        self._clock = 0.0
        """Virtual time: `seconds` of the tenant that was served last."""
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
            lane = self._lanes.setdefault(job.tenant, _Lane())
            if lane.is_idle:  # time in which it asked for nothing is no credit
                lane.seconds = max(lane.seconds, self._clock)
            (lane.compiles if job.is_long else lane.masks).append(job)
            self._queued.notify()
        if not self._is_running:
            self._start()

    def cancel(self, job: Job) -> bool:
        """Keeps threads from starting a job; False where one has. What runs ends by itself."""
        with self._queued:
            if job.has_started:
                return False
            job.has_started = True
            if job.is_queued:
                lane = self._lanes[job.tenant]
                (lane.compiles if job.is_long else lane.masks).remove(job)
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
        _lower_priority()
        while True:
            with self._queued:
                while (job := self._take()) is None:
                    self._queued.wait()
            self._finish(job, _execute(job))
            del job  # a thread that waits keeps nothing alive

    def _take(self) -> Job | None:
        """The next job, where one may run now; called with the lock."""
        for lane in sorted(self._lanes.values(), key=lambda lane: lane.seconds):
            if lane.running >= self._n_threads - 1:
                continue
            may_compile = self._n_long < self._n_threads - 2
            queue = lane.masks or (lane.compiles if may_compile else None)
            if queue:
                job = queue.popleft()
                job.has_started = True
                lane.running += 1
                self._n_long += job.is_long
                self._clock = max(self._clock, lane.seconds)
                return job
        return None

    def _finish(self, job: Job, seconds: float) -> None:
        with self._queued:
            lane = self._lanes[job.tenant]
            lane.running -= 1
            lane.seconds += seconds
            self._n_long -= job.is_long
            job.done = True
            self._finished.notify_all()
            self._queued.notify()  # a cap may have kept another job from starting
            if len(self._lanes) > _MOST_IDLE_TENANTS:
                self._forget_idle()

    def _forget_idle(self) -> None:
        """Forgets tenants whose use the virtual time has caught up with."""
        for tenant, lane in list(self._lanes.items()):
            if lane.is_idle and lane.seconds <= self._clock:
                del self._lanes[tenant]


def _execute(job: Job) -> float:
    """CPU seconds that it took."""
    started = time.thread_time()
    try:
        job.work()
    except BaseException as error:  # a panic in Rust is no Exception
        job.error = error
    return time.thread_time() - started


def _lower_priority() -> None:
    """Linux counts a nice value for each thread: the forward pass comes first where cores are scarce."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))
