"""Batch-invariance check: `--deterministic` verifies at the start that concurrent requests do not affect logits.

A few short prompts are computed alone, together, in another order, in small chunks and in a large batch. Every
log-probability must be bitwise equal, and therefore every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from app.common.types import Request, SamplingParams
from app.engine.execution.engine import Engine
from app.engine.scheduling.scheduler import StepLimits

_LENGTHS = (3, 17, 40, 75)
_NEW_TOKENS = 6
"""Tokens that are generated after each prompt."""
_CHUNK = 16
_LARGE_BATCH = 32


class BatchVarianceError(ValueError):
    """Concurrent requests changed a result; the message says which one."""


@dataclass(frozen=True, slots=True)
class DeviceUnderTest:
    """The engines and dimensions that the check uses."""

    make_engine: Callable[[StepLimits], Engine]
    """Returns an idle engine with an empty cache; engines that it returned before are no longer used."""
    limits: StepLimits
    """Upper bounds of the limits that the check passes."""
    context: int
    vocab_size: int
    has_encoder: bool


@dataclass(slots=True)
class _Answer:
    """Results of one prompt; owned by _answers()."""

    scores: list[float] = field(default_factory=list)
    sampled: list[tuple[int | None, float | None]] = field(default_factory=list)

    def difference(self, other: _Answer) -> str | None:
        """Description of the first difference, if there is one."""
        pairs = zip(self.scores, other.scores, strict=True)
        for index, (ours, theirs) in enumerate(pairs, start=2):
            if ours != theirs:
                return f"the log-probability of its token {index} is {theirs!r} and alone {ours!r}"
        for index, (one, another) in enumerate(zip(self.sampled, other.sampled, strict=True), start=1):
            if one != another:
                return f"token {index} after it is {another[0]} ({another[1]!r}) and alone {one[0]} ({one[1]!r})"
        return None


def check_batch_invariance(device: DeviceUnderTest) -> str:
    """Runs the check and returns its result for the log. Raises BatchVarianceError."""
    requests = list(_requests(device, _LENGTHS))
    alone: dict[str, _Answer] = {}
    for request in requests:
        alone |= _answers(device.make_engine(device.limits), [request])
    for arrangement, limits, batch in _arrangements(device, requests):
        answers = _answers(device.make_engine(limits), batch)
        for request in requests:
            if difference := alone[request.id].difference(answers[request.id]):
                raise BatchVarianceError(
                    f"--deterministic cannot be guaranteed on this device: computed {arrangement}, the prompt of "
                    f"{len(request.prompt)} tokens gives another result, {difference}; start without it"
                )
    n_numbers = sum(len(answer.scores) + len(answer.sampled) for answer in alone.values())
    return f"batch invariance verified: {n_numbers} log-probabilities equal alone, together, in chunks, in a full batch"


def _arrangements(device: DeviceUnderTest, requests: list[Request]) -> Iterator[tuple[str, StepLimits, list[Request]]]:
    limits = device.limits
    n_running = min(len(requests), limits.max_running)
    chunk = min(max(_CHUNK, n_running), limits.tokens_per_step)
    chunked = replace(limits, max_running=n_running, tokens_per_step=chunk)
    lengths = [1 + index % 5 for index in range(min(_LARGE_BATCH, limits.max_running) - len(requests))]
    others = list(_requests(device, lengths, name="other"))
    yield "together with others", limits, requests
    yield "in another order", limits, requests[::-1]
    yield "in small chunks", chunked, requests
    yield f"in a batch of {len(requests) + len(others)}", limits, [*others[::2], *requests, *others[1::2]]


def _requests(device: DeviceUnderTest, lengths: Sequence[int], name: str = "row") -> Iterator[Request]:
    random = Random(name)
    new_tokens = min(_NEW_TOKENS, device.context // 2)
    for index, length in enumerate(lengths):
        prompt = tuple(random.randrange(device.vocab_size) for _ in range(min(length, device.context - new_tokens)))
        params = SamplingParams(temperature=index % 2, seed=index, logprobs=0)
        yield Request(
            id=f"{name} {index}",
            prompt=prompt,
            max_tokens=new_tokens,
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
            raise BatchVarianceError(f"--deterministic cannot be verified on this device: {report.failed[0].message}")
        for scores in report.scores:
            answers[scores.request_id].scores += [own for own, _top in scores.tokens]
        for event in report.events:
            answers[event.request_id].sampled.append((event.token, event.logprob))
    return answers
