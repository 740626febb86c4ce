"""One step ahead with a real model: the events of every request are those of an engine that waits for each step."""

from __future__ import annotations

import random

import pytest

from app.common.types import Request, SamplingParams
from app.engine.execution.engine import Engine
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from model.nn.transformer import Decoder
from tests.support.engine.delayed_runner import Delayed, WatchedPool
from tests.support.model.tiny_models import run_all, tiny_config, tiny_decoder, tiny_engine

pytestmark = pytest.mark.usefixtures("one_thread")


def _engine_ahead(decoder: Decoder, *, blocks: int, tokens: int, running: int = 32) -> tuple[Engine, Delayed]:
    limits = StepLimits(tokens_per_step=tokens, max_running=running)
    pool = WatchedPool(blocks, 16)
    device = Delayed(tiny_engine(decoder, blocks=blocks, tokens_per_step=tokens, max_running=running).runner, pool)
    return Engine(Scheduler(limits, pool), device, device), device


def _requests(count: int, seed: int) -> list[Request]:
    """Greedy and seeded, with penalties and log-probabilities; forks, common beginnings, stop tokens, few tokens."""
    rng = random.Random(seed)
    common, made = [rng.randrange(1, 320) for _ in range(40)], list[Request]()
    while len(made) < count:
        own = [rng.randrange(1, 320) for _ in range(rng.randint(1, 60))]
        prompt, stop_ids = tuple(common + own if rng.random() < 0.5 else own), tuple(rng.sample(range(320), 12))
        leader, max_tokens = f"r{len(made)}", rng.choice([0, 1, 2, rng.randint(3, 60), rng.randint(3, 60)])
        scored = rng.choice([1, *[None] * 7])
        for i in range(rng.choice([1, 1, 3])):
            params = SamplingParams(
                temperature=rng.choice([0.0, 0.7, 1.3]),
                top_p=rng.choice([1.0, 0.9]),
                repetition_penalty=rng.choice([1.0, 1.3]),
                frequency_penalty=rng.choice([0.0, 0.4]),
                seed=rng.getrandbits(63),
                logprobs=rng.choice([None, 3]),
            )
            changes = {"leader": leader} if i else {"prompt_logprobs": scored}
            name = f"r{len(made)}"
            made.append(
                Request(id=name, prompt=prompt, max_tokens=max_tokens, params=params, stop_ids=stop_ids, **changes)
            )
    return made


@pytest.mark.parametrize(("blocks", "tokens"), [(400, 128), (400, 16), (11, 40)])
def test_every_request_gets_the_same_events_as_without_a_step_ahead(blocks: int, tokens: int) -> None:
    decoder, requests = tiny_decoder(), _requests(30, seed=2)
    engine, device = _engine_ahead(decoder, blocks=blocks, tokens=tokens, running=16)
    expected = run_all(tiny_engine(decoder, blocks=400), requests)
    for _ in range(2):  # the second time, prompts are found in the cache
        assert run_all(engine, requests) == expected
    assert device.n_launched > 30, "the engine was meant to be ahead"
    assert (engine.scheduler.preemptions > 0) == (blocks < 20), "only the small cache was meant to be too small"


def test_an_encoders_sources_are_read_ahead_too() -> None:
    decoder = tiny_decoder(tiny_config(n_encoder_layers=1))
    requests = [Request(id=f"r{i}", prompt=(1, 2 + i), max_tokens=6, source=tuple(range(3, 20 + i))) for i in range(5)]
    engine, _ = _engine_ahead(decoder, blocks=64, tokens=128, running=4)
    assert run_all(engine, requests) == run_all(tiny_engine(decoder), requests)
