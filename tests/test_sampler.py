"""The sampler: published test vectors, the distribution it draws from, and rows that do not know one another."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.engine.params import SamplingParams
from app.engine.sampler import SamplingRow, philox, sample, uniform

# Known answers of philox4x32-10 from the Random123 distribution: counter, key, result.
_VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), _VECTORS)
def test_philox_gives_the_published_numbers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox(counter, key) == expected


def test_uniform_numbers_are_uniform_and_depend_on_seed_and_position() -> None:
    numbers = torch.tensor([uniform(7, position) for position in range(20_000)], dtype=torch.float64)
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.01
    assert abs(float(numbers.var()) - 1 / 12) < 0.01
    seeds = [0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63)]
    assert len({uniform(seed, position) for seed in seeds for position in (0, 1, 2**20)}) == 21


def _draw(logits: torch.Tensor, params: SamplingParams, position: int = 0) -> int:
    token = sample(logits[None], [SamplingRow(params, position)])[0].token
    assert token is not None
    return token


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert _draw(torch.tensor([0.0, 3.0, 3.0, 3.0]), SamplingParams(temperature=0)) == 1


def test_draws_follow_the_softmax() -> None:
    logits, n = torch.tensor([2.0, 1.0, 0.0, -1.0]), 40_000
    rows = [SamplingRow(SamplingParams(seed=1, temperature=0.7), position) for position in range(n)]
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
        ({"temperature": 1e-5}, {0}),
    ],
)
def test_filters_keep_what_they_should(params: dict[str, float], allowed: set[int]) -> None:
    """Probabilities 0.5, 0.25, 0.15, 0.10; after top_k 3 they are 0.56, 0.28, 0.17, so that 0.8 needs two."""
    logits = torch.tensor([0.5, 0.25, 0.15, 0.10]).log()
    seen = {_draw(logits, SamplingParams(seed=3, **params), position) for position in range(400)}  # type: ignore[arg-type]
    assert seen == allowed


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 0.0}])
def test_top_one_is_greedy_also_where_tokens_tie(params: dict[str, Any]) -> None:
    logits = torch.tensor([0.0, 2.0, 2.0])
    assert {_draw(logits, SamplingParams(seed=1, **params), position) for position in range(50)} == {1}


def test_tokens_that_tie_at_a_filters_edge_stay_together() -> None:
    logits = torch.tensor([1.0, 0.0, 0.0, -9.0])
    for params in (SamplingParams(top_k=2, seed=1), SamplingParams(top_p=0.6, seed=1)):
        assert {_draw(logits, params, position) for position in range(300)} == {0, 1, 2}


def test_a_nucleus_wider_than_the_first_try_is_exact() -> None:
    logits = torch.zeros(3000)
    logits[:1000] = 1.0
    seen = {_draw(logits, SamplingParams(top_p=0.5, seed=2), position) for position in range(300)}
    assert max(seen) < 1000 and len(seen) > 200


@pytest.mark.parametrize(
    "params", [{}, {"logprobs": 3}, {"temperature": 0.0, "logprobs": 0}, {"top_k": 5, "top_p": 0.5}]
)
def test_a_row_that_is_not_finite_gives_no_token_and_hurts_nobody(params: dict[str, Any]) -> None:
    logits = torch.randn(3, 50)
    rows = [SamplingRow(SamplingParams(seed=i, **params), 0) for i in range(3)]
    clean = sample(logits, rows)
    for poison in (math.nan, math.inf, -math.inf):
        broken = logits.clone()
        broken[1, 7] = poison
        drawn = sample(broken, rows)
        assert drawn[1].token is None
        assert (drawn[0], drawn[2]) == (clean[0], clean[2])


_PARAMS = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(1e-300, 10)),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.one_of(st.none(), st.integers(0, 20)),
)


_TINY = [SamplingParams(temperature=t, logprobs=2) for t in (5e-324, 1e-300, 1e-45, 1e-38, 1e-20)]


@settings(max_examples=200, deadline=None)
@example(_TINY, 4096, 0)
@given(st.lists(_PARAMS, min_size=2, max_size=6), st.sampled_from([1, 2, 40, 300, 60_000]), st.integers(0, 2**31))
def test_no_accepted_parameter_raises_and_no_row_depends_on_its_neighbours(
    params: list[SamplingParams], vocab: int, seed: int
) -> None:
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(seed)) * 10
    rows = [SamplingRow(each, position) for position, each in enumerate(params)]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]
    assert all(drawn.token is not None and 0 <= drawn.token < vocab for drawn in together)


def test_logprobs_are_the_models_own_and_the_chosen_one_equals_its_entry() -> None:
    logits = torch.randn(1, 100)
    params = SamplingParams(temperature=5.0, top_k=3, logprobs=20, seed=9)
    (drawn,) = sample(logits, [SamplingRow(params, 0)])
    expected = logits[0].log_softmax(-1)
    assert drawn.logprob == pytest.approx(float(expected[drawn.token]), abs=1e-6)
    assert dict(drawn.top)[drawn.token or 0] == drawn.logprob
    assert [value for _, value in drawn.top] == sorted((value for _, value in drawn.top), reverse=True)
    assert len(drawn.top) == 20


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
    ],
)
def test_parameters_outside_their_range_cannot_be_made(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]
