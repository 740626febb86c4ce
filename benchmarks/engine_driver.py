"""Requests for an engine, and loops that step it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.common.types import Request, SampledEvent, SamplingParams, StepReport
from app.engine.execution.engine import Engine

_MOST_STEPS = 100_000


@dataclass(slots=True)
class Outputs:
    """Outputs of requests, by request id."""

    events: dict[str, list[SampledEvent]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def take(self, report: StepReport) -> None:
        """Adds the events of a step."""
        for event in report.events:
            self.events.setdefault(event.request_id, []).append(event)
        self.failed |= {failed.request_id: failed.message for failed in report.failed}

    def tokens(self, name: str) -> tuple[int, ...]:
        """Tokens of one request; empty if it has none."""
        return tuple(event.token for event in self.events.get(name, ()) if event.token is not None)

    def logprobs(self, name: str) -> tuple[float | None, ...]:
        """Log-probabilities as the engine reported them."""
        return tuple(event.logprob for event in self.events.get(name, ()))


def random_prompt(length: int, vocab_size: int, seed: object) -> tuple[int, ...]:
    """Random tokens: the same for the same seed, and no common prefix that a cache could hold."""
    rng = random.Random(str(seed))
    return tuple(rng.randrange(vocab_size) for _ in range(length))


def request(name: str, prompt: Sequence[int], tokens: int, **params: Any) -> Request:
    """A request that is greedy by default, and that only its length ends."""
    how = SamplingParams(**{"temperature": 0.0, **params})
    return Request(id=name, prompt=tuple(prompt), max_tokens=tokens, params=how)


def run_all(engine: Engine, requests: Iterable[Request]) -> Outputs:
    """Adds all requests, and steps until they have finished."""
    outputs = Outputs()
    for one in requests:
        engine.add(one)
    for _ in range(_MOST_STEPS):
        if not engine.has_work:
            return outputs
        outputs.take(engine.step())
    raise AssertionError("the engine does not finish")


def run_until_decoding(engine: Engine, rows: int) -> None:
    """Steps until one step continues every sequence; from then on all steps only decode."""
    for _ in range(_MOST_STEPS):
        report = engine.step()
        assert not report.failed, report.failed
        if len(report.events) == rows:
            return
    raise AssertionError(f"the engine does not run {rows} sequences at once")


def cancel_all(engine: Engine) -> None:
    """Cancels all requests, and steps until none is in flight."""
    for sequence in list(engine.scheduler.running):
        engine.cancel(sequence.request.id)
    for _ in range(8):
        if engine.has_work:
            engine.step()
    assert not engine.has_work, "cancelled requests are still running"
