"""An engine that launches one step ahead of a simulated device, and the events that its clients receive."""

from __future__ import annotations

from collections import Counter

import msgspec

from app.common.types import BatchPlan, FinishReason, Request, RequestStarted, StepReport
from app.engine.execution.engine import Engine
from app.engine.sampling.sampler_io import StepResult
from tests.support.engine.delayed_runner import Delayed
from tests.support.engine.scheduler_simulation import Delivered, SimulatedDevice, alone


class Faulty:
    """A simulated device; one request's rows can be made not finite."""

    def __init__(self, block_size: int) -> None:
        self.device = SimulatedDevice(block_size)
        self.bad = ""

    def run(self, plan: BatchPlan) -> StepResult:
        if plan.chunks[0].sequence.request.id == "probe":
            return StepResult()
        return self.device.run(plan, bad=self.bad)


def has(plan: BatchPlan, name: str) -> bool:
    """Whether it computes anything of this request."""
    return any(chunk.sequence.request.id == name for chunk in plan.chunks)


class World:
    """An engine, and what its clients have of it."""

    def __init__(self, engine: Engine, device: Delayed) -> None:
        self.engine, self.device = engine, device
        self.requests: list[Request] = []
        self.delivered = Delivered([])
        self.left: dict[str, int] = {}
        """Canceled requests, each with the number of steps started by then."""
        self.failed: set[str] = set()
        self.started: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.requests.append(request)
            self.delivered.events[request.id] = []
            self.delivered.scores[request.id] = [float(n) for n in range(request.scored)]
            self.engine.add(request)

    def cancel(self, name: str) -> None:
        known = {request.id for request in self.requests}
        if name in known and name not in self.delivered.finished | self.failed:
            self.left.setdefault(name, len(self.device.begun))
        self.engine.cancel(name)

    def crash(self, engine: Engine, device: Delayed) -> None:
        """Only what the clients have survives: open requests are resubmitted from there, in order."""
        self.engine, self.device = engine, device
        self.left = dict.fromkeys(self.left, 0)
        self.started.clear()
        for request in self.requests:
            name = request.id
            tokens = tuple(token for token in self.delivered.tokens(name) if token is not None)
            device.draws[name] = len(self.delivered.events[name])
            if name not in self.delivered.finished | self.failed | self.left.keys():
                scored = len(self.delivered.scores[name])
                engine.add(msgspec.structs.replace(request, generated=tokens, scored=scored))

    def step(self) -> StepReport:
        report = self.engine.step(self._on_started)
        assert not self.engine.scheduler.violations()
        reported = {each.request_id for each in (*report.events, *report.scores, *report.failed)}
        assert not reported & (self.left.keys() | self.failed), "the report mentions a canceled or failed request"
        assert reported <= self.started.keys(), "reported before its start"
        self.failed |= {failed.request_id for failed in report.failed}
        self.delivered.take(report)
        return report

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def check_the_end(self) -> None:
        """Every output is as without concurrent requests, at most one row was wasted, and no block is in use."""
        assert not self.engine.has_work, "the schedule does not come to an end"
        assert self.engine.scheduler.pool.counts.active == 0
        assert set(self.started.values()) <= {1}
        for request in self.requests:
            name, expected = request.id, alone(request)
            tokens, scores = self.delivered.tokens(name), self.delivered.scores[name]
            assert tokens == expected.tokens(name)[: len(tokens)]
            assert scores == expected.scores[name][: len(scores)]
            ends = (name in self.left, name in self.failed, name in self.delivered.finished)
            assert sum(ends) == 1, f"{name}: {ends}"
            wasted = self.device.draws[name] - len(tokens)
            if name in self.delivered.finished:
                assert (len(tokens), len(scores)) == (len(expected.tokens(name)), len(expected.scores[name]))
                by_length = self.delivered.events[name][-1].finish == FinishReason.LENGTH
                assert wasted <= (0 if by_length else 1), "rows of a request that has ended"
            assert 0 <= wasted <= (2 if name in self.failed else 1)
            self.counts["wasted"] += wasted
            if name in self.left:
                assert not any(has(plan, name) for plan in self.device.begun[self.left[name] :])

    def _on_started(self, started: tuple[RequestStarted, ...]) -> None:
        self.started.update(each.request_id for each in started)
