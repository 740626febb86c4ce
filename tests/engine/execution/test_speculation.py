"""Lookup drafts change no bit: 1,000 random requests over all parameters, on and off, for each backend.

The torch backend, which is slow, gets the first 250 of them; INKSTREAM_TEST_REQUESTS=1000 gives it all.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

from app.common.types import Request, SamplingParams
from app.engine.execution.engine import Engine
from app.engine.speculation import speculation
from app.engine.speculation.lookup import LookupProposer
from app.engine.speculation.speculation import Speculation
from app.engine.speculation.step_costs import StepCosts
from model.config import LayerKind, Rope
from model.nn.transformer import Decoder
from tests.support.engine.mixed_requests import serve
from tests.support.model.tiny_models import tiny_config, tiny_decoder, tiny_engine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("way", "two_threads")]
_IN_ONE_ENGINE = 25
_COSTS = {1: 1.0, 2: 1.05, 8: 1.2, 32: 2.0}


def _speculating(engine: Engine) -> Engine:
    """With costs that no step corrects, so that the same drafts are verified on any machine."""
    engine.scheduler.draft_planner = Speculation(LookupProposer(), StepCosts(_COSTS))
    return engine


def _request(rng: random.Random, name: str) -> Request:
    """Most prompts repeat themselves, and most settings let the text repeat them, so that many drafts are right."""
    phrase = [rng.randrange(1, 320) for _ in range(rng.randint(1, 12))]
    prompt = [rng.randrange(1, 320) for _ in range(rng.randint(0, 20))] + phrase * rng.randint(1, 4)
    biases = dict.fromkeys(phrase[:4], 8.0) if rng.random() < 0.7 else {}
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.3, 0.8, 1.5]),
        top_k=rng.choice([0, 0, 1, 5, 40]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.0]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        typical_p=rng.choice([1.0, 1.0, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.2, 0.9]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.1, -0.2]),
        logit_bias=tuple(biases.items()),
        min_tokens=rng.choice([0, 0, 5, 40]),
        seed=rng.getrandbits(62) * rng.choice([1, -1]),
        choice=rng.choice([0, 0, 3]),
        logprobs=rng.choice([None, None, 0, 2, 20]),
    )
    return Request(
        id=name,
        prompt=tuple(prompt),
        max_tokens=rng.randint(0, 40),
        params=params,
        stop_ids=tuple(rng.sample(range(320), rng.choice([0, 2, 10]))),
        prompt_logprobs=rng.choice([None, None, None, 1]),
        cache_namespace=rng.choice(["", "ann"]),
        speculate=rng.random() < 0.9,
    )


def _decoders() -> list[Decoder]:
    windowed = tuple(LayerKind(window=window, rope=Rope()) for window in (None, 20))
    return [
        tiny_decoder(),
        tiny_decoder(dtype=torch.bfloat16),
        tiny_decoder(tiny_config(n_layers=2, layer_kinds=windowed, layer_types=(0, 1))),
    ]


def test_a_thousand_requests_get_the_same_bits_with_drafts(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_PATIENCE", 10**9)  # drafts in every step that may have some
    decoders, n_drafted, n_accepted = _decoders(), 0, 0
    count = int(os.environ.get("INKSTREAM_TEST_REQUESTS", 250 if way == "torch" else 1000))
    for seed in range(count // _IN_ONE_ENGINE):
        rng = random.Random(seed)
        requests = [_request(rng, f"seed {seed}, request {i}") for i in range(_IN_ONE_ENGINE)]
        options = {"blocks": rng.choice([40, 400]), "max_running": rng.choice([1, 4, 25]), "tokens_per_step": 60}
        decoder = decoders[seed % len(decoders)]
        expected = serve(tiny_engine(decoder, **options), requests)
        engine = _speculating(tiny_engine(decoder, **options))
        found = serve(engine, requests)
        for request in requests:
            assert found[request.id] == expected[request.id], f"{request.id}: {request}"
        n_drafted += engine.scheduler.drafted
        n_accepted += engine.scheduler.accepted
    assert n_accepted > 2 * count, "drafts were meant to be right"
    assert n_drafted - n_accepted > count, "drafts were meant to be wrong"


def test_request_without_speculation_has_no_drafts() -> None:
    request = Request(
        id="r", prompt=(5, 6, 7) * 9, max_tokens=40, params=SamplingParams(temperature=0), speculate=False
    )
    engine = _speculating(tiny_engine(tiny_decoder()))
    serve(engine, [request])
    assert engine.scheduler.drafted == 0


def test_costs_learn_from_steps_that_decode() -> None:
    engine, costs = tiny_engine(tiny_decoder()), StepCosts(_COSTS)
    engine.speculate(Speculation(LookupProposer(), costs))
    before = costs._scale
    serve(engine, [Request(id="r", prompt=(5, 6, 7), max_tokens=20)])
    assert costs._scale != before
