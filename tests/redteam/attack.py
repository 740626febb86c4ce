"""Building blocks of attacks: a time budget, a seeded generator, findings, and measurements under load."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from random import Random

from tests.redteam.http_client import percentile
from tests.redteam.service import Launcher, Target

STARVATION_FACTOR = 5.0
"""A tenant may slow another one down by this factor: the floor of promise S26."""
STARVATION_SLACK = 0.1
"""Seconds that are noise on a small machine."""
MOST_FINDINGS = 2
"""Findings to report of one group: further ones are the same defect."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An attack that succeeded, with a minimal reproduction."""

    severity: str
    summary: str
    repro: str


@dataclass(slots=True, kw_only=True)
class Report:
    """The tries and findings of an attack."""

    attack: str
    tries: int = 0
    worst: str = "-"
    limit: str = "-"
    skipped: str = ""
    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """How often each group of findings was seen."""

    def add(self, severity: str, summary: str, repro: str, *, group: str = "") -> None:
        """Counts a finding; keeps the first ones of each group."""
        self.counts[group] = self.counts.get(group, 0) + 1
        if self.counts[group] <= MOST_FINDINGS and len(self.findings) < 10 * MOST_FINDINGS:
            self.findings.append(Finding(severity, summary, repro))

    @property
    def found(self) -> int:
        """The number of all findings, including those that are not kept."""
        return sum(self.counts.values())

    @property
    def verdict(self) -> str:
        if self.skipped:
            return "skipped"
        return "FOUND" if self.findings else "refused"


class Budget:
    """Time budget of an attack, in seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ends = time.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self._ends - time.monotonic())

    def share(self, part: float) -> Budget:
        """A budget of this share of the whole, and never more than what is left."""
        return Budget(min(self.left(), part * self.seconds))

    def __bool__(self) -> bool:
        return self.left() > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Inputs of an attack."""

    target: Target
    rng: Random
    budget: Budget
    report: Report
    canary: str
    launcher: Launcher | None
    most_tries: int

    @property
    def own_launcher(self) -> Launcher:
        """The launcher, for attacks with `needs_launcher`."""
        assert self.launcher is not None
        return self.launcher

    def tries(self, budget: Budget | None = None, most: int | None = None) -> Iterator[int]:
        """Counts the report's tries from 0 while the budget lasts."""
        budget = self.budget if budget is None else budget
        most = self.most_tries if most is None else most
        while budget and self.report.tries < most:
            self.report.tries += 1
            yield self.report.tries - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One class of attacks; `run` fills the report until the budget is spent."""

    name: str
    share: float
    """Seconds of a run of two minutes."""
    needs_launcher: bool
    """Whether the attack needs files or signals of a service that the suite starts."""
    run: Callable[[Setting], None]


def attack(name: str, *, share: float, needs_launcher: bool = False) -> Callable[[Callable[[Setting], None]], Attack]:
    """Turns a function into an attack."""
    return lambda run: Attack(name=name, share=share, needs_launcher=needs_launcher, run=run)


class Load:
    """Repeats an action in threads of a separate process, so that it takes no time from the measurement of the victim.

    Leaving the block kills the process, which closes its connections at once.
    """

    def __init__(self, action: Callable[[int], object], threads: int) -> None:
        self._action, self._threads = action, threads
        context = multiprocessing.get_context("fork")  # actions are closures
        self._rounds = context.Value("q", 0)
        self._process = context.Process(target=self._run, daemon=True)

    @property
    def rounds(self) -> int:
        """How often the action ran."""
        return int(self._rounds.value)

    def _run(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threads = [threading.Thread(target=self._repeat, args=(i,), daemon=True) for i in range(self._threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _repeat(self, index: int) -> None:
        while os.getppid() != 1:
            with suppress(OSError, ValueError):
                self._action(index)
            with self._rounds.get_lock():
                self._rounds.value += 1
            time.sleep(0.005)

    def __enter__(self) -> Load:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """A measurement of the victim without and under load, in seconds."""

    alone: float
    loaded: float

    @property
    def limit(self) -> float:
        return max(STARVATION_FACTOR * self.alone, self.alone + STARVATION_SLACK)

    @property
    def is_excessive(self) -> bool:
        return self.loaded > self.limit


def measure_slowdown(
    victim: Callable[[], float], load: Load, *, budget: Budget, baseline: Load | None = None
) -> Slowdown:
    """Median seconds of the victim without the load (or under an ordinary one) and under it."""
    with baseline or nullcontext():
        if baseline is not None:
            time.sleep(0.3)
        alone = _median(victim, budget.share(0.25), least=3)
    with load:
        time.sleep(min(0.5, 0.1 * budget.seconds))
        return Slowdown(alone=alone, loaded=_median(victim, budget.share(0.5), least=1))


def _median(victim: Callable[[], float], budget: Budget, *, least: int) -> float:
    """A failed call counts with the time it took."""
    figures: list[float] = []
    while len(figures) < 100 and (budget or len(figures) < least):
        began = time.monotonic()
        try:
            figures.append(victim())
        except (OSError, ValueError):
            figures.append(time.monotonic() - began)
    return percentile(figures, 0.5)
