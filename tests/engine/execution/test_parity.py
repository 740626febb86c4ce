"""Batch invariance for complex requests, forks, scored prompts, head layouts and encoders; and the oracle."""

from __future__ import annotations

import random
from array import array
from functools import partial
from itertools import cycle

import msgspec
import pytest
import torch
from torch import Tensor

from app.common.types import Request, SamplingParams
from app.engine.sampling.parameters import SamplingInput
from app.engine.sampling.sampler import sample
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, Sequence, StepResult
from model.config import ModelConfig
from model.nn.reference import generate, logits
from tests.support.engine.guessing_planner import speculating
from tests.support.engine.mixed_requests import serve
from tests.support.engine.parity import alone, expect_parity
from tests.support.model.tiny_models import round_weights_for, run_all, tiny_config, tiny_decoder, tiny_engine

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(6, 2, 64, 192), (8, 1, 32, 128), (3, 3, 32, 96), (8, 2, 128, 256), (4, 2, 64, 2048)]
"""Query heads, kv heads, head_dim, width; the last one sums over more numbers than a single bfloat16 row bears."""
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("way", "two_threads")]


def _config(shape: tuple[int, int, int, int]) -> ModelConfig:
    heads, kv_heads, head_dim, width = shape
    return tiny_config(n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim, width=width, context=1024, n_layers=1)


def _requests(count: int, seed: int, *, longest: int = 150) -> list[Request]:
    """Prompts of many lengths, half of them with a common prefix; greedy and seeded sampling; log-probabilities."""
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


def _forks() -> list[Request]:
    """Up to four continuations of prompts that end blocks of 16 early, late and exactly."""
    rng = random.Random(1)
    made = []
    for i, length in enumerate((1, 2, 16, 17, 31, 33, 64, 75)):
        prompt = tuple(rng.randrange(1, 320) for _ in range(length))
        params = SamplingParams(temperature=1.0, seed=rng.getrandbits(63), logprobs=3)
        lead = Request(id=f"p{length}", prompt=prompt, max_tokens=rng.randint(10, 30), params=params)
        made.append(lead)
        for choice in range(1, 1 + i % 4):
            own = msgspec.structs.replace(params, choice=choice)
            made.append(msgspec.structs.replace(lead, id=f"{lead.id}/{choice}", leader=lead.id, params=own))
    return made


def _scored() -> list[Request]:
    """A third of the requests asks for no log-probabilities, some for no output."""
    kinds = cycle([(None, 35), (0, 0), (1, 35), (5, 35), (20, 30), (None, 1)])
    pairs = zip(_requests(16, seed=4, longest=110), kinds, strict=False)
    return [msgspec.structs.replace(request, prompt_logprobs=n, max_tokens=most) for request, (n, most) in pairs]


CASES = {"rich": (partial(_requests, 20, seed=1), 12), "forks": (_forks, 7), "scored": (_scored, 10)}
"""Requests, and a number of blocks that is too small for them."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_scheduling_does_not_change_a_bit(case: str, dtype: torch.dtype) -> None:
    make, tight = CASES[case]
    requests = make()
    outcomes = expect_parity(tiny_decoder(dtype=dtype), requests, tight=tight)
    for request in requests:
        assert len(outcomes[request.id].scores) == (len(request.prompt) - 1) * (request.prompt_logprobs is not None)


@pytest.mark.usefixtures("int8_cache")
@pytest.mark.parametrize(("case", "dtype"), [("forks", torch.float32), ("scored", torch.bfloat16)])
def test_scheduling_does_not_change_a_bit_with_an_int8_cache(case: str, dtype: torch.dtype) -> None:
    """Forks copy blocks with their scales."""
    make, tight = CASES[case]
    expect_parity(tiny_decoder(dtype=dtype), make(), tight=tight)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parity_for_other_head_layouts_and_long_contexts(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    decoder, requests = tiny_decoder(_config(shape), dtype=dtype), _requests(5, seed=6, longest=1000)
    assert serve(tiny_engine(decoder, blocks=300, tokens_per_step=97), requests) == alone(decoder, requests)


@pytest.mark.parametrize("shape", [None, *SHAPES])
def test_engine_samples_the_tokens_of_the_oracle(shape: tuple[int, int, int, int] | None, way: str) -> None:
    """Against reference.generate, which attends by another formula: equal tokens, not equal bits, in float32."""
    decoder = tiny_decoder(_config(shape) if shape else None)
    requests = _requests(6, seed=0) if shape is None else _requests(2, seed=0, longest=700)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_one_chunk_sample_what_they_sample_one_by_one(dtype: torch.dtype) -> None:
    """Beside a chunk that samples its last row only; the drafts are right."""
    requests = [msgspec.structs.replace(request, max_tokens=9) for request in _requests(6, seed=3)]
    decoder, chunks = tiny_decoder(dtype=dtype), list[Chunk]()
    events = run_all(tiny_engine(decoder, blocks=200), requests)
    for i, request in enumerate(requests):
        drawn = [event.token or 0 for event in events[request.id][:-1]]
        known, drafts = (request.prompt, tuple(drawn)) if i % 3 else ((*request.prompt, *drawn), ())
        blocks = (array("i", range(20 * i, 20 * i + 20)),)
        sequence = Sequence(request=request, tokens=array("q", known), arrival=i, blocks=blocks)
        chunks.append(Chunk(sequence, 0, len(known) + len(drafts), drafts))
    sampled = tiny_engine(decoder, blocks=200, tokens_per_step=2000).runner.run(BatchPlan(tuple(chunks))).sampled
    for chunk in chunks:
        own = events[chunk.sequence.request.id][-len(chunk.sampled_rows) :]
        rows = sampled[chunk.sequence.request.id]
        assert [(row.token, row.logprob, row.top) for row in rows] == [(e.token, e.logprob, e.top) for e in own]
    assert [len(rows) for rows in sampled.values()] == [1, 9, 9] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_drafts_change_no_bit(dtype: torch.dtype) -> None:
    """Right and wrong ones: every decode computes two rows."""
    requests, rng = (
        [msgspec.structs.replace(request, max_tokens=20) for request in _requests(6, seed=4)],
        random.Random(1),
    )
    decoder = tiny_decoder(dtype=dtype)
    expected = run_all(tiny_engine(decoder, blocks=200), requests)
    engine = tiny_engine(decoder, blocks=200)

    def guess(sequence: Sequence) -> int:
        right = expected[sequence.request.id][sequence.num_generated :]
        return right[0].token if right and right[0].token is not None and rng.random() < 0.5 else 5

    speculating(engine, lambda sequence: [guess(sequence)])
    steps, run = list[int](), engine.runner.run

    def counted(plan: BatchPlan) -> StepResult:
        steps.append(sum(bool(chunk.drafts) for chunk in plan.chunks))
        return run(plan)

    engine.runner.run = counted  # type: ignore[method-assign]
    assert run_all(engine, requests) == expected
    n_tokens = sum(len(events) for events in expected.values())
    assert n_tokens / 2 < sum(steps) < n_tokens - 10, "some drafts were right, and not all"


def test_scores_in_pieces_of_any_size_equal_the_reference(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, requests = tiny_decoder(), _scored()
    round_weights_for(way, decoder)
    outcomes = serve(tiny_engine(decoder, blocks=200, tokens_per_step=40), requests)
    for rows in (1, 3):
        monkeypatch.setattr("app.engine.execution.runner._PIECE_BYTES", 4 * 320 * rows)
        assert serve(tiny_engine(decoder, blocks=200, tokens_per_step=40), requests) == outcomes
    for request in (r for r in requests if r.prompt_logprobs is not None):
        expected = logits(decoder, list(request.prompt)).log_softmax(-1)
        for index, (own, top) in enumerate(outcomes[request.id].scores, start=1):
            assert own == pytest.approx(expected[index - 1, request.prompt[index]].item(), abs=1e-4)
            assert [value for _, value in top] == pytest.approx(
                expected[index - 1].topk(request.prompt_logprobs or 0).values.tolist(), abs=1e-4
            )
            assert dict(top).get(request.prompt[index], own) == own, "both reports of a log-probability must agree"
