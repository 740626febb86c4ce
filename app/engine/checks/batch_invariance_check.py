"""Batch-invariance check: `--deterministic` verifies at the start that a request's logits ignore concurrent requests.

A few short prompts are computed alone, together, in another order, in small chunks and in a large batch. Every
log-probability must be bitwise equal, and so every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from app.common.types import Request, SamplingParams
from app.engine.execution.engine import Engine
from app.engine.scheduling.scheduler import StepLimits

_LENGTHS = (3, 17, 40, 75)
_MORE = 6
"""Tokens that are drawn behind each prompt."""
_PIECE = 16
_CROWD = 32


class BatchVarianceError(ValueError):
    """Concurrent requests changed an answer; the message says which one."""


@dataclass(frozen=True, slots=True)
class DeviceUnderTest:
    """What the trial needs to know of what computes."""

    make_engine: Callable[[StepLimits], Engine]
    """An idle engine with an empty cache; none that was made before is used any more."""
    limits: StepLimits
    """The most that it may be given."""
    context: int
    vocab_size: int
    has_encoder: bool


@dataclass(slots=True)
class _Answer:
    """Of one prompt; owned by _answers()."""

    scores: list[float] = field(default_factory=list)
    drawn: list[tuple[int | None, float | None]] = field(default_factory=list)

    def difference(self, other: _Answer) -> str | None:
        """What is the first of them, for people."""
        pairs = zip(self.scores, other.scores, strict=True)
        for place, (ours, theirs) in enumerate(pairs, start=2):
            if ours != theirs:
                return f"the log-probability of its token {place} is {theirs!r} and alone {ours!r}"
        for place, (one, another) in enumerate(zip(self.drawn, other.drawn, strict=True), start=1):
            if one != another:
                return f"token {place} behind it is {another[0]} ({another[1]!r}) and alone {one[0]} ({one[1]!r})"
        return None


def prove_rows(device: DeviceUnderTest) -> str:
    """A sentence for the log. Raises BatchVarianceError."""
    requests = list(_requests(device, _LENGTHS))
    alone: dict[str, _Answer] = {}
    for request in requests:
        alone |= _answers(device.make_engine(device.limits), [request])
    for way, limits, beside in _ways(device, requests):
        answers = _answers(device.make_engine(limits), beside)
        for request in requests:
            if difference := alone[request.id].difference(answers[request.id]):
                raise BatchVarianceError(
                    f"--deterministic cannot be kept on this device: computed {way}, the prompt of "
                    f"{len(request.prompt)} tokens gives another answer, {difference}; start without it"
                )
    n_numbers = sum(len(answer.scores) + len(answer.drawn) for answer in alone.values())
    return f"rows proven independent: {n_numbers} log-probabilities the same alone, together, in pieces, in a crowd"


def _ways(device: DeviceUnderTest, requests: list[Request]) -> Iterator[tuple[str, StepLimits, list[Request]]]:
    limits = device.limits
    few = min(len(requests), limits.max_running)
    pieces = replace(limits, max_running=few, tokens_per_step=min(max(_PIECE, few), limits.tokens_per_step))
    lengths = [1 + place % 5 for place in range(min(_CROWD, limits.max_running) - len(requests))]
    crowd = list(_requests(device, lengths, name="beside"))
    yield "together with others", limits, requests
    yield "in another order", limits, requests[::-1]
    yield "in small pieces", pieces, requests
    yield f"in a crowd of {len(requests) + len(crowd)}", limits, [*crowd[::2], *requests, *crowd[1::2]]


def _requests(device: DeviceUnderTest, lengths: Sequence[int], name: str = "row") -> Iterator[Request]:
    random = Random(name)
    more = min(_MORE, device.context // 2)
    for place, length in enumerate(lengths):
        prompt = tuple(random.randrange(device.vocab_size) for _ in range(min(length, device.context - more)))
        params = SamplingParams(temperature=place % 2, seed=place, logprobs=0)
        yield Request(
            id=f"{name} {place}",
            prompt=prompt,
            max_tokens=more,
            params=params,
            prompt_logprobs=0,
            source=prompt if device.has_encoder else (),
        )


def _answers(engine: Engine, requests: list[Request]) -> dict[str, _Answer]:
    answers = {request.id: _Answer() for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        report = engine.step()
        if report.failed:
            raise BatchVarianceError(f"--deterministic cannot be proven on this device: {report.failed[0].message}")
        for scores in report.scores:
            answers[scores.request_id].scores += [own for own, _top in scores.tokens]
        for event in report.events:
            answers[event.request_id].drawn.append((event.token, event.logprob))
    return answers
