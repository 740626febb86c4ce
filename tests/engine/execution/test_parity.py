"""The law of the engine: alone = batched = chunked = cached = preempted = submitted again, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from app.common.types import Request, RequestStarted, SampledEvent, SamplingParams
from app.engine.sampling.sampler import sample
from app.engine.sampling.sampler_io import SamplingInput
from model.nn.reference import generate
from model.nn.transformer import Decoder
from tests.support.model.tiny_models import round_weights_for, run_all, tiny_config, tiny_decoder, tiny_engine

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(6, 2, 64, 192), (8, 1, 32, 128), (3, 3, 32, 96), (8, 2, 128, 256), (4, 2, 64, 2048)]
"""Query heads, kv heads, head_dim, width; the last one sums over more numbers than a single bfloat16 row bears."""
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("way", "two_threads")]


def _requests(count: int, seed: int, *, longest: int = 150) -> list[Request]:
    """Prompts of many lengths, half of them with a common beginning; greedy and seeded draws; log-probabilities."""
    rng, more = random.Random(seed), random.Random(seed + 1000)
    common = [rng.randrange(1, 320) for _ in range(70)]
    made = []
    for i in range(count):
        own = [rng.randrange(1, 320) for _ in range(rng.randint(1, longest - 70))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.3]),
            top_k=rng.choice([0, 0, 5, 50]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.05]),
            typical_p=more.choice([1.0, 0.8]),
            repetition_penalty=more.choice([1.0, 1.3]),
            presence_penalty=more.choice([0.0, 0.5]),
            frequency_penalty=more.choice([0.0, 0.4]),
            logit_bias=((7, 5.0), (9, -100.0)) if i % 3 == 0 else (),
            choice=i,
            seed=rng.getrandbits(63),
            logprobs=3,
        )
        prompt = tuple(common + own if i % 2 else own)
        made.append(Request(id=f"r{i}", prompt=prompt, max_tokens=rng.randint(1, 40), params=params))
    return made


def _alone(decoder: Decoder, requests: list[Request]) -> dict[str, list[SampledEvent]]:
    """Each request on a fresh engine of its own, prompt in one piece."""
    return {r.id: run_all(tiny_engine(decoder, tokens_per_step=512), [r])[r.id] for r in requests}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_gives_every_request_what_it_gets_alone(dtype: torch.dtype) -> None:
    decoder, requests = tiny_decoder(dtype=dtype), _requests(24, seed=1)
    assert run_all(tiny_engine(decoder, blocks=400), requests) == _alone(decoder, requests)


@pytest.mark.parametrize("tokens_per_step", [4, 7, 33])
@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_in_pieces_change_no_bit(dtype: torch.dtype, tokens_per_step: int) -> None:
    decoder, requests = tiny_decoder(dtype=dtype), _requests(6, seed=2)
    engine = tiny_engine(decoder, blocks=200, tokens_per_step=tokens_per_step, max_running=4)
    assert run_all(engine, requests) == _alone(decoder, requests)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cached_prompts_change_no_bit(dtype: torch.dtype) -> None:
    decoder, requests = tiny_decoder(dtype=dtype), _requests(8, seed=3)
    engine = tiny_engine(decoder, blocks=400)
    first = run_all(engine, requests)
    engine.add(requests[1])
    started: list[RequestStarted] = []
    engine.step(started.extend)
    engine.cancel(requests[1].id)
    assert started[0].cached_tokens >= 64, "the second round was meant to hit the cache"
    assert run_all(engine, requests) == first == _alone(decoder, requests)


@pytest.mark.parametrize("dtype", DTYPES)
def test_preemption_changes_no_bit(dtype: torch.dtype) -> None:
    decoder, requests = tiny_decoder(dtype=dtype), _requests(16, seed=4)
    engine = tiny_engine(decoder, blocks=22)
    result = run_all(engine, requests)
    assert engine.scheduler.preemptions > 0, "the cache was meant to be too small"
    assert result == _alone(decoder, requests)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_request_submitted_again_with_its_tokens_goes_on_as_before(dtype: torch.dtype) -> None:
    decoder = tiny_decoder(dtype=dtype)
    for request in _requests(6, seed=5):
        whole = run_all(tiny_engine(decoder), [request])[request.id]
        cut = len(whole) // 2
        again = Request(
            id=request.id,
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            params=request.params,
            generated=tuple(event.token for event in whole[:cut] if event.token is not None),
        )
        assert run_all(tiny_engine(decoder), [again])[request.id] == whole[cut:]


@pytest.mark.parametrize("seed", range(4))
def test_the_engine_draws_the_tokens_of_the_oracle(seed: int, way: str) -> None:
    """Against reference.generate, which attends by another formula: equal tokens, not equal bits, in float32."""
    decoder, requests = tiny_decoder(seed=seed), _requests(6, seed=seed)
    round_weights_for(way, decoder)
    engine_tokens = run_all(tiny_engine(decoder, blocks=200), requests)
    for request in requests:
        tokens = list(request.prompt)

        def choose(logits_V: Tensor, position: int, request: Request = request, tokens: list[int] = tokens) -> int:
            assert position == len(tokens)
            token = sample(logits_V[None], [SamplingInput(request.params, tokens, len(request.prompt))])[0].token
            assert token is not None
            tokens.append(token)
            return token

        expected = generate(decoder, list(request.prompt), request.max_tokens, choose=choose)
        assert [event.token for event in engine_tokens[request.id]] == expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_law_holds_for_other_head_layouts_and_long_contexts(
    dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    heads, kv_heads, head_dim, width = shape
    config = tiny_config(n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim, width=width, context=1024, n_layers=1)
    decoder = tiny_decoder(config, dtype=dtype)
    requests = _requests(5, seed=6, longest=1000)
    alone = {r.id: run_all(tiny_engine(decoder, tokens_per_step=1024), [r])[r.id] for r in requests}
    assert run_all(tiny_engine(decoder, blocks=300, tokens_per_step=97), requests) == alone
