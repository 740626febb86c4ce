"""Requests for an engine, and a loop that steps it until they finish."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.common.types import Request, SampledEvent, SamplingParams, StepReport
from app.engine.execution.engine import Engine

_MOST_STEPS = 100_000


@dataclass(slots=True)
class Texts:
    """Results of requests, by request id. Owned by the code that runs the engine."""

    events: dict[str, list[SampledEvent]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def take(self, report: StepReport) -> None:
        """One step more."""
        for event in report.events:
            self.events.setdefault(event.request_id, []).append(event)
        self.failed |= {failed.request_id: failed.message for failed in report.failed}

    def tokens(self, name: str) -> tuple[int, ...]:
        """Of one text; none where there is none."""
        return tuple(event.token for event in self.events.get(name, ()) if event.token is not None)

    def logprobs(self, name: str) -> tuple[float | None, ...]:
        """As they were reported."""
        return tuple(event.logprob for event in self.events.get(name, ()))


def prompt_of(length: int, vocab_size: int, seed: object) -> tuple[int, ...]:
    """Random tokens: the same for the same seed, without a common beginning that a cache could know."""
    draw = random.Random(str(seed))
    return tuple(draw.randrange(vocab_size) for _ in range(length))


def request(name: str, prompt: Sequence[int], tokens: int, **params: Any) -> Request:
    """Greedy if nothing else is asked for; nothing but its length ends it."""
    how = SamplingParams(**{"temperature": 0.0, **params})
    return Request(id=name, prompt=tuple(prompt), max_tokens=tokens, params=how)


def run_all(engine: Engine, requests: Iterable[Request]) -> Texts:
    """Until the last of them has ended."""
    texts = Texts()
    for one in requests:
        engine.add(one)
    for _ in range(_MOST_STEPS):
        if not engine.has_work:
            return texts
        texts.take(engine.step())
    raise AssertionError("the engine does not come to an end")


def settle(engine: Engine, rows: int) -> None:
    """Steps until one continues every text; what comes then is decoding alone."""
    for _ in range(_MOST_STEPS):
        report = engine.step()
        assert not report.failed, report.failed
        if len(report.events) == rows:
            return
    raise AssertionError(f"the engine does not come to run {rows} texts at once")


def clear(engine: Engine) -> None:
    """No request is left, nor a step in flight."""
    for sequence in list(engine.scheduler.running):
        engine.cancel(sequence.request.id)
    for _ in range(8):
        if engine.has_work:
            engine.step()
    assert not engine.has_work, "cancelled requests go on"
