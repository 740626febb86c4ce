"""32 requests of all kinds for an in-process engine, and their results."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import torch

from app.common.types import Request, SampledEvent, SamplingParams, TokenScore
from app.engine.execution.engine import Engine
from model.nn.transformer import Decoder
from tests.support.model.tiny_models import VOCAB, tiny_config, tiny_decoder

VICTIM = "victim"
POISON = 7
"""A token whose embedding is NaN; only a victim reads or samples it."""


def poisoned_decoder() -> Decoder:
    """A model that is correct except for one token."""
    decoder = tiny_decoder(tiny_config(tied_head=False))
    decoder.embedding[POISON] = torch.nan
    return decoder


def mixed_requests(count: int, *, seed: int = 0, longest: int = 60, max_tokens: int = 12) -> list[Request]:
    """A victim among other requests: greedy and seeded, with scores, forks and shared prefixes."""
    rng = random.Random(seed)
    common = _tokens(rng, 40)
    made: list[Request] = []
    while len(made) < count:
        has_victim = any(request.id == VICTIM for request in made)
        name = VICTIM if len(made) >= count // 2 and not has_victim else f"r{len(made)}"
        prompt = (common if rng.random() < 0.4 else []) + _tokens(rng, rng.randint(1, longest))
        leader = Request(
            id=name,
            prompt=tuple(prompt[:longest] if name != VICTIM else _tokens(rng, 110)),  # takes several prefill chunks
            max_tokens=rng.randint(2, max_tokens) if name != VICTIM else max_tokens,
            params=_params(rng),
            prompt_logprobs=2 if name == VICTIM or rng.random() < 0.2 else None,
        )
        made.append(leader)
        for i in range(1, rng.choice([1, 1, 1, 3]) if name != VICTIM else 1):
            follower = {"id": f"{name}/{i}", "leader": name, "prompt_logprobs": None}
            made.append(msgspec.structs.replace(leader, **follower, params=_params(rng)))
    return made[:count]  # without surplus forks


def _params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.8, 1.2]),
        top_p=rng.choice([1.0, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        seed=rng.getrandbits(40),
        logprobs=rng.choice([None, 0, 3]),
        logit_bias=((POISON, -100.0),),
    )


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [token for token in (rng.randrange(VOCAB) for _ in range(count)) if token != POISON] or [1]


@dataclass(slots=True)
class Outcome:
    """The engine's output for one request."""

    events: list[SampledEvent] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def ends(self) -> int:
        """Number of terminal events, which must be 1."""
        return len(self.failures) + sum(event.finish is not None for event in self.events)


def serve(engine: Engine, requests: list[Request], *, max_steps: int = 5000) -> dict[str, Outcome]:
    """Runs concurrent requests to completion; checks block invariants after every step, and for leaks at the end."""
    outcomes = {request.id: Outcome() for request in requests}
    for request in requests:
        engine.add(request)
    for _ in range(max_steps):
        if not engine.has_work:
            assert not any(pool.active for pool in engine.scheduler.pools), "leaked blocks"
            return outcomes
        report = engine.step()
        assert not engine.scheduler.violations()
        for event in report.events:
            assert not outcomes[event.request_id].ends, "an event after the end"
            outcomes[event.request_id].events.append(event)
        for scored in report.scores:
            outcomes[scored.request_id].scores += scored.tokens
        for failed in report.failed:
            outcomes[failed.request_id].failures.append(failed.message)
    raise AssertionError(f"the engine still has work after {max_steps} steps")
