"""Forks and prompt log-probabilities on a real decoder: the bits of each request alone, however the work was done."""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec
import pytest
import torch

from app.common.types import Request, SampledEvent, SamplingParams, TokenScore
from app.engine.execution.engine import Engine
from app.engine.scheduling.block_allocator import BlockAllocator
from model.nn.reference import logits
from model.nn.transformer import Decoder
from tests.engine.execution.test_encoder_decoder import ENCODER
from tests.support.engine.scheduler_simulation import Delivered
from tests.support.model.tiny_models import round_weights_for, run_all, tiny_config, tiny_decoder, tiny_engine

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("one_thread", "way")


def _choices(rng: random.Random, name: str, prompt: Iterable[int], count: int) -> list[Request]:
    """n continuations of one prompt: the seed is shared, and some have one of their own."""
    params = SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=rng.getrandbits(63), logprobs=3)
    lead = Request(id=f"{name}/0", prompt=tuple(prompt), max_tokens=rng.randint(1, 30), params=params)
    made = [lead]
    for choice in range(1, count):
        own = msgspec.structs.replace(params, choice=choice, seed=params.seed + choice // 2, temperature=1.0)
        made.append(msgspec.structs.replace(lead, id=f"{name}/{choice}", leader=lead.id, params=own))
    return made


def _groups(seed: int) -> list[Request]:
    """Prompts that end blocks of 16 early, late and exactly."""
    rng = random.Random(seed)
    requests = []
    for i, length in enumerate((1, 2, 16, 17, 31, 33, 64, 75)):
        prompt = [rng.randrange(1, 320) for _ in range(length)]
        requests += _choices(rng, f"p{i}", prompt, 1 + i % 4)
    return requests


def _alone(decoder: Decoder, requests: list[Request]) -> dict[str, list[SampledEvent]]:
    return {r.id: run_all(tiny_engine(decoder, tokens_per_step=512), [r])[r.id] for r in requests}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fork_draws_what_it_draws_alone(dtype: torch.dtype) -> None:
    decoder, requests = tiny_decoder(dtype=dtype), _groups(1)
    alone = _alone(decoder, requests)
    tight = tiny_engine(decoder, blocks=11, tokens_per_step=37)
    assert run_all(tiny_engine(decoder, blocks=300, tokens_per_step=512), requests) == alone, "together"
    assert run_all(tiny_engine(decoder, blocks=300, tokens_per_step=7, max_running=5), requests) == alone, "in pieces"
    assert run_all(tight, requests) == alone, "preempted"
    assert tight.scheduler.preemptions > 0, "the cache was meant to be too small"


def _without_copies(allocator: BlockAllocator) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    clear, allocator._clear, allocator._copies = tuple(allocator._clear), [], []
    return clear, ()


def test_a_fork_without_its_copy_draws_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control."""
    decoder, requests = tiny_decoder(), _groups(1)
    alone = _alone(decoder, requests)
    monkeypatch.setattr(BlockAllocator, "take_preparations", _without_copies)
    assert run_all(tiny_engine(decoder, blocks=300, tokens_per_step=512), requests) != alone


@pytest.mark.parametrize("way", ["torch"], indirect=True)  # no other computes encoders
@pytest.mark.parametrize("dtype", DTYPES)
def test_forks_look_at_the_source_of_their_leader(dtype: torch.dtype) -> None:
    decoder = tiny_decoder(tiny_config(**ENCODER, final_norm=False), dtype=dtype)
    requests = [
        msgspec.structs.replace(r, id=name + r.id, leader=r.leader and name + r.leader, source=source)
        for name, source in (("a", (5, 6, 7)), ("b", (8,) * 70))
        for r in _groups(2)[10:]
    ]
    alone, tight = _alone(decoder, requests), tiny_engine(decoder, blocks=8, tokens_per_step=300)
    assert run_all(tiny_engine(decoder, blocks=500), requests) == alone
    assert run_all(tight, requests) == alone
    assert tight.scheduler.preemptions > 0


def test_a_fork_is_a_row_of_one_token_from_its_first_step_on() -> None:
    decoder, rng = tiny_decoder(), random.Random(3)
    engine = tiny_engine(decoder, tokens_per_step=70)
    for request in _choices(rng, "r", range(1, 65), 6):
        engine.add(request)
    engine.step()
    plan = engine.scheduler.plan()
    assert [chunk.stop - chunk.start for chunk in plan.chunks] == [1] * 6


def _scored(seed: int, count: int = 10) -> list[Request]:
    """Prompts of many lengths, half of them with a common beginning; every third asks for no log-probabilities."""
    rng = random.Random(seed)
    common = [rng.randrange(1, 320) for _ in range(40)]
    requests = []
    for i in range(count):
        own = [rng.randrange(1, 320) for _ in range(rng.choice([1, 2, 23, 70, 100]))]
        (request,) = _choices(rng, f"r{i}", common + own if i % 2 else own, 1)
        n_logprobs = None if i % 3 == 2 else rng.choice([0, 1, 5, 20])
        requests.append(
            msgspec.structs.replace(request, prompt_logprobs=n_logprobs, max_tokens=rng.choice([0, 1, 20, 35]))
        )
    return requests


def _run(engine: Engine, requests: list[Request]) -> dict[str, tuple[tuple[TokenScore, ...], list[SampledEvent]]]:
    """Scores and events of each; that scores come once, in order and first is checked on the way."""
    delivered = Delivered(requests)
    scores: dict[str, tuple[TokenScore, ...]] = {request.id: () for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        report = engine.step()
        assert not report.failed
        assert not engine.scheduler.violations()
        delivered.take(report)
        for score in report.scores:
            scores[score.request_id] += score.tokens
    return {request.id: (scores[request.id], delivered.events[request.id]) for request in requests}


def _alone_scored(
    decoder: Decoder, requests: list[Request]
) -> dict[str, tuple[tuple[TokenScore, ...], list[SampledEvent]]]:
    return {r.id: _run(tiny_engine(decoder, tokens_per_step=512), [r])[r.id] for r in requests}


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_company_changes_a_prompts_scores(dtype: torch.dtype) -> None:
    decoder, requests = tiny_decoder(dtype=dtype), _scored(4)
    alone = _alone_scored(decoder, requests)
    assert all(len(alone[r.id][0]) == (len(r.prompt) - 1) * (r.prompt_logprobs is not None) for r in requests)
    roomy, tight = tiny_engine(decoder, blocks=200), tiny_engine(decoder, blocks=16, tokens_per_step=90)
    assert _run(roomy, requests) == alone, "together"
    assert _run(roomy, requests) == alone, "with a cache that knows every prompt"
    assert _run(tiny_engine(decoder, blocks=200, tokens_per_step=7, max_running=3), requests) == alone, "in pieces"
    assert _run(tight, requests) == alone, "preempted"
    assert tight.scheduler.preemptions > 0, "the cache was meant to be too small"


def test_a_prompt_that_had_to_give_way_is_not_scored_twice() -> None:
    """Delivered.take checks it; here it is made sure that it happens."""
    decoder, rng = tiny_decoder(), random.Random(5)
    (old,) = _choices(rng, "old", [1], 1)
    (long,) = _choices(rng, "long", [rng.randrange(320) for _ in range(100)], 1)
    requests = [
        msgspec.structs.replace(old, max_tokens=40),
        msgspec.structs.replace(long, max_tokens=3, prompt_logprobs=5),
    ]
    engine = tiny_engine(decoder, blocks=9, tokens_per_step=3, max_running=2)
    engine.add(requests[0])
    engine.add(requests[1])
    halfway, delivered = False, Delivered(requests)
    while engine.has_work:
        delivered.take(engine.step())
        halfway |= any(s.num_scored and s.num_unscored for s in engine.scheduler.waiting)
    assert halfway, "the prompt was meant to be cut short"
    assert delivered.scores["long/0"] == [own for own, _ in _alone_scored(decoder, requests)["long/0"][0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_request_submitted_again_gets_the_scores_it_has_not_got(dtype: torch.dtype) -> None:
    decoder, requests = tiny_decoder(dtype=dtype), _scored(6, count=6)
    engine = tiny_engine(decoder, blocks=200)
    alone = _run(engine, requests)
    for request in requests:
        scores, events = alone[request.id]
        for scored in {0, len(scores) // 2, len(scores), len(request.prompt)}:
            again = msgspec.structs.replace(request, scored=scored)
            assert _run(engine, [again])[request.id] == (scores[scored:], events)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 50])
def test_the_size_of_a_piece_changes_no_bit(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, requests = tiny_decoder(dtype=dtype), _scored(7, count=4)
    whole = _alone_scored(decoder, requests)
    monkeypatch.setattr("app.engine.execution.runner._PIECE_BYTES", 4 * 320 * rows)
    assert _alone_scored(decoder, requests) == whole


def test_scores_are_those_of_the_reference(way: str) -> None:
    decoder, requests = tiny_decoder(), _scored(8)
    round_weights_for(way, decoder)
    together = _run(tiny_engine(decoder, blocks=200, tokens_per_step=40), requests)
    for request in (r for r in requests if r.prompt_logprobs is not None):
        expected = logits(decoder, list(request.prompt)).log_softmax(-1)
        for index, (own, top) in enumerate(together[request.id][0], start=1):
            assert own == pytest.approx(expected[index - 1, request.prompt[index]].item(), abs=1e-4)
            assert [value for _, value in top] == pytest.approx(
                expected[index - 1].topk(request.prompt_logprobs or 0).values.tolist(), abs=1e-4
            )
            assert dict(top).get(request.prompt[index], own) == own, "one number, whichever way it is reported"


def test_a_prompt_whose_rows_are_not_finite_fails_alone() -> None:
    """Token 7's embedding is infinite; who neither asks for scores nor has it in the prompt does not notice."""
    decoder = tiny_decoder(tiny_config(tied_head=False))
    decoder.embedding.data[7] = torch.inf
    good = Request(id="good", prompt=tuple(range(20, 40)), max_tokens=2, prompt_logprobs=1)
    bad = Request(id="bad", prompt=(20, 7, 21), max_tokens=2, prompt_logprobs=1)
    engine = tiny_engine(decoder)
    engine.add(good)
    engine.add(bad)
    reports = [engine.step() for _ in range(2)]
    assert [failed.request_id for report in reports for failed in report.failed] == ["bad"]
    assert {score.request_id for report in reports for score in report.scores} == {"good"}
    assert not engine.has_work
