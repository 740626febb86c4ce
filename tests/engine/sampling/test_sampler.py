"""The sampler: the distribution it draws from, its filters and ties, and what it reports."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch

from app.common.types import SamplingParams
from app.engine.sampling.logits_processors import FILTERS, STAGE_NAMES, apply_stages
from app.engine.sampling.sampler import TorchSampler, row_parameters
from app.engine.sampling.sampler import sample as sample_together
from app.engine.sampling.sampler_io import SamplingInput
from tests.support.engine.native_sampler import Sample


def _row(params: SamplingParams, position: int = 0) -> SamplingInput:
    """Only the position counts: without penalties the sampler does not read the tokens."""
    return SamplingInput(params, range(position), position)


def _draw(sample: Sample, logits: torch.Tensor, params: SamplingParams, position: int = 0) -> int:
    token = sample(logits[None], [_row(params, position)])[0].token
    assert token is not None
    return token


def test_greedy_ties_go_to_the_lowest_id(sample: Sample) -> None:
    assert _draw(sample, torch.tensor([0.0, 3.0, 3.0, 3.0]), SamplingParams(temperature=0)) == 1


def test_draws_follow_the_softmax(sample: Sample) -> None:
    logits, n = torch.tensor([2.0, 1.0, 0.0, -1.0]), 40_000
    rows = [_row(SamplingParams(seed=1, temperature=0.7), position) for position in range(n)]
    counts = torch.zeros(4)
    for drawn in sample(logits.expand(n, -1), rows):
        assert drawn.token is not None
        counts[drawn.token] += 1
    assert torch.allclose(counts / n, (logits / 0.7).softmax(-1), atol=0.01)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.0}, {0}),
        ({"top_p": 0.4}, {0}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.99}, {0, 1, 2, 3}),
        ({"min_p": 1.0}, {0}),
        ({"min_p": 0.5}, {0, 1}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),
        # Surprise is 0.69, 1.39, 1.90, 2.30 and 1.21 on average: the second token is the most typical one.
        ({"typical_p": 0.1}, {1}),
        ({"typical_p": 0.25}, {1}),
        ({"typical_p": 0.3}, {0, 1}),
        ({"typical_p": 0.8}, {0, 1, 2}),
        ({"typical_p": 0.1, "top_k": 1}, {0}),
        ({"typical_p": 0.1, "top_p": 0.0}, {1}),
        ({"typical_p": 0.8, "top_p": 0.5}, {0}),
        ({"temperature": 1e-5}, {0}),
    ],
)
def test_filters_keep_what_they_should(sample: Sample, params: dict[str, float], allowed: set[int]) -> None:
    """Probabilities 0.5, 0.25, 0.15, 0.10; after top_k 3 they are 0.56, 0.28, 0.17, so that 0.8 needs two."""
    logits = torch.tensor([0.5, 0.25, 0.15, 0.10]).log()
    seen = {_draw(sample, logits, SamplingParams(seed=3, **params), position) for position in range(400)}  # type: ignore[arg-type]
    assert seen == allowed


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 0.0}])
def test_top_one_is_greedy_also_where_tokens_tie(sample: Sample, params: dict[str, Any]) -> None:
    logits = torch.tensor([0.0, 2.0, 2.0])
    assert {_draw(sample, logits, SamplingParams(seed=1, **params), position) for position in range(50)} == {1}


def test_tokens_that_tie_at_a_filters_edge_stay_together(sample: Sample) -> None:
    logits = torch.tensor([1.0, 0.0, 0.0, -9.0])
    for params in (SamplingParams(top_k=2, seed=1), SamplingParams(top_p=0.6, seed=1)):
        assert {_draw(sample, logits, params, position) for position in range(300)} == {0, 1, 2}


def test_a_nucleus_wider_than_the_first_try_is_exact(sample: Sample) -> None:
    logits = torch.zeros(3000)
    logits[:1000] = 1.0
    seen = {_draw(sample, logits, SamplingParams(top_p=0.5, seed=2), position) for position in range(300)}
    assert max(seen) < 1000 and len(seen) > 200


@pytest.mark.parametrize(
    "params", [{}, {"logprobs": 3}, {"temperature": 0.0, "logprobs": 0}, {"top_k": 5, "top_p": 0.5}]
)
def test_a_row_that_is_not_finite_gives_no_token_and_hurts_no_other_row(sample: Sample, params: dict[str, Any]) -> None:
    logits = torch.randn(3, 50)
    rows = [_row(SamplingParams(seed=i, **params)) for i in range(3)]
    clean = sample(logits, rows)
    for poison in (math.nan, math.inf, -math.inf):
        broken = logits.clone()
        broken[1, 7] = poison
        drawn = sample(broken, rows)
        assert drawn[1].token is None
        assert (drawn[0], drawn[2]) == (clean[0], clean[2])


def test_vocabularies_of_many_sizes_keep_the_law_of_rows(sample: Sample) -> None:
    """Long rows are summed in shares of the threads, short ones are not: neither may show."""
    filters = {"top_k": 50, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.01}
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"typical_p": 0.5}, filters, {"min_p": 0.1}, {"temperature": 0}]
    for vocab in (4096, 50_257, 60_000):
        logits = torch.randn(len(kinds), vocab, generator=torch.Generator().manual_seed(vocab)) * 3
        rows = [_row(SamplingParams(seed=i, logprobs=20, **kind), i) for i, kind in enumerate(kinds)]
        together = sample(logits, rows)
        assert together == [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]


def test_logprobs_are_the_models_own_and_the_chosen_one_equals_its_entry(sample: Sample) -> None:
    logits = torch.randn(1, 100)
    params = SamplingParams(temperature=5.0, top_k=3, logprobs=20, seed=9)
    (drawn,) = sample(logits, [_row(params)])
    expected = logits[0].log_softmax(-1)
    assert drawn.logprob == pytest.approx(float(expected[drawn.token]), abs=1e-6)
    assert dict(drawn.top)[drawn.token or 0] == drawn.logprob
    assert [value for _, value in drawn.top] == sorted((value for _, value in drawn.top), reverse=True)
    assert len(drawn.top) == 20


def test_of_tokens_equally_likely_the_lowest_ids_are_reported(sample: Sample) -> None:
    for vocab, others in ((10, 3), (300, 30), (3000, 3000)):
        logits = torch.zeros(2, vocab)
        logits[:, :others] = -1.0
        logits[:, 2] = 5.0
        best = [2, *range(others, vocab), *(i for i in range(others) if i != 2)]
        for count in (1, 2, 20):
            rows = [_row(SamplingParams(temperature=0, logprobs=count)), _row(SamplingParams(logprobs=7))]
            drawn, _ = sample(logits, rows)
            assert [token for token, _ in drawn.top] == best[:count]


def test_tokens_and_neighbours_that_ask_for_more_change_no_report(sample: Sample) -> None:
    logits = torch.randn(2, 500).bfloat16()
    few, many = _row(SamplingParams(logprobs=3, seed=1)), _row(SamplingParams(logprobs=20, seed=2))
    assert sample(logits, [few, many])[0] == sample(logits[:1], [few])[0]
    assert sample(logits, [few, _row(SamplingParams())])[0] == sample(logits[:1], [few])[0]
    assert sample(logits, [few, many])[0].top == sample(logits, [many, many])[0].top[:3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 10.1},
        {"top_k": -1},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"seed": 2**63},
        {"logprobs": 21},
        {"typical_p": 0.0},
        {"typical_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"logit_bias": ((1, 101.0),)},
        {"logit_bias": ((-1, 0.0),)},
        {"logit_bias": ((1, 1.0), (1, 2.0))},
        {"logit_bias": tuple((i, 0.0) for i in range(301))},
        {"min_tokens": -1},
        {"choice": -1},
    ],
)
def test_parameters_outside_their_range_cannot_be_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_rows_are_filtered_alike_whether_the_host_may_wait_or_not() -> None:
    """Short rows are sorted, longer ones only where their top tokens do not suffice; on a device all are."""
    rng, shares = random.Random(0), [5e-324, 1e-300, 0.2, 0.5, 0.9, 1.0]
    for seed in range(150):
        generator = torch.Generator().manual_seed(seed)
        logits_SX = (torch.randn(4, 564, generator=generator) * rng.choice([0.3, 3.0])).round(decimals=1)
        logits_SX[:, 64:].clamp_(max=rng.choice([-1.0, 9.0]))
        rows = [
            _row(
                SamplingParams(
                    temperature=rng.choice([1e-300, 0.5, 1.0, 5.0]),
                    top_k=rng.choice([0, 1, 5, 50]),
                    top_p=rng.choice([0.0, *shares]),
                    typical_p=rng.choice(shares),
                    min_p=rng.choice([0.0, 0.1, 1.0]),
                )
            )
            for _ in range(4)
        ]
        parameters = dataclasses.replace(row_parameters(rows, 564, "cpu"), stages=STAGE_NAMES)
        waiting, static = (
            apply_stages(logits_SX, dataclasses.replace(parameters, may_wait=may_wait), FILTERS).weights_SV
            for may_wait in (True, False)
        )
        assert torch.equal(waiting, static), rows
        assert (waiting > 0).any(-1).all()


def test_rows_are_drawn_piece_by_piece_as_together(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = 500
    logits_SV = torch.randn(7, vocab, generator=torch.Generator().manual_seed(4)) * 3
    kinds = ({"temperature": 0}, {"typical_p": 0.9, "logprobs": 3}, {"top_k": 9, "repetition_penalty": 1.2})
    rows = [SamplingInput(SamplingParams(seed=i, **kinds[i % 3]), [i, 2], 1) for i in range(7)]
    whole = TorchSampler().sample(logits_SV, rows)
    assert whole == sample_together(logits_SV, rows)
    for size in (1, 4 * vocab * 3):
        monkeypatch.setattr("app.engine.sampling.sampler._PIECE_BYTES", size)
        assert TorchSampler().sample(logits_SV, rows) == whole
