"""Grammars, biases and penalties: each changes the logits by its formula, before sampling."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from app.common.types import SamplingParams
from app.engine.sampling.sampler_io import SampledToken, SamplingInput
from tests.support.engine.native_sampler import Sample

LOGITS = torch.tensor([3.0, 2.0, 1.0, -1.0])


def _greedy(sample: Sample, row: SamplingInput, logits: torch.Tensor = LOGITS) -> int | None:
    return sample(logits[None], [row])[0].token


def _row(tokens: list[int], n_prompt: int, **params: Any) -> SamplingInput:
    return SamplingInput(SamplingParams(temperature=0, **params), tokens, n_prompt)


def _mask(*tokens: int, words: int = 1) -> torch.Tensor:
    numbers = [sum(1 << token % 32 for token in tokens if token // 32 == word) for word in range(words)]
    return torch.tensor([n - 2**32 if n >= 2**31 else n for n in numbers], dtype=torch.int32)


@pytest.mark.parametrize(
    ("tokens", "n_prompt", "params", "best"),
    [
        # repetition_penalty: prompt and output, once however often; 3 / 1.6 < 2, 3 / 1.4 > 2.
        ([0], 1, {"repetition_penalty": 1.6}, 1),
        ([0], 0, {"repetition_penalty": 1.6}, 1),
        ([0, 0, 0], 1, {"repetition_penalty": 1.4}, 0),
        ([1], 1, {"repetition_penalty": 0.5}, 1),
        # presence_penalty: generated tokens only, once.
        ([0], 1, {"presence_penalty": 2.0}, 0),
        ([1, 0], 1, {"presence_penalty": 1.1}, 1),
        ([1, 0, 0, 0], 1, {"presence_penalty": 0.9}, 0),
        # frequency_penalty: generated tokens only, each time; 3 - 3 * 0.4 < 2 < 3 - 2 * 0.4.
        ([0, 0, 0], 3, {"frequency_penalty": 2.0}, 0),
        ([0, 0, 0], 1, {"frequency_penalty": 0.4}, 0),
        ([1, 0, 0, 0], 1, {"frequency_penalty": 0.4}, 1),
        ([3, 2, 2], 0, {"frequency_penalty": -2.0}, 2),
        # logit_bias; ids beyond the vocabulary change nothing.
        ([], 0, {"logit_bias": ((3, 5.0), (9, 100.0), (2**62, 1.0))}, 3),
        ([], 0, {"logit_bias": ((0, -100.0), (1, -100.0))}, 2),
        # The order: the bias first, then the penalty on what it made, (3 + 3) / 2 < 2 + 1.5.
        ([0], 1, {"logit_bias": ((0, 3.0), (1, 1.5)), "repetition_penalty": 2.0}, 1),
        # repetition before presence: 3 / 2 - 1 < 1; the other way round it would be (3 - 1) / 2 = 1, and the lowest id.
        ([1, 0], 0, {"repetition_penalty": 2.0, "presence_penalty": 1.0}, 2),
    ],
)
def test_biases_and_penalties_follow_their_formulas(
    sample: Sample, tokens: list[int], n_prompt: int, params: dict[str, Any], best: int
) -> None:
    assert _greedy(sample, _row(tokens, n_prompt, **params)) == best


def test_a_penalty_lowers_negative_logits_too(sample: Sample) -> None:
    logits = torch.tensor([-1.0, -1.5])
    assert _greedy(sample, _row([0], 1, repetition_penalty=2.0), logits) == 1
    assert _greedy(sample, _row([1], 1, repetition_penalty=0.5), logits) == 1


def test_log_probabilities_are_of_the_logits_as_they_were(sample: Sample) -> None:
    row = _row([0, 1], 0, repetition_penalty=3.0, presence_penalty=2.0, logit_bias=((2, 50.0),), logprobs=2)
    (drawn,) = sample(LOGITS[None], [row])
    own = LOGITS.log_softmax(-1).tolist()
    assert drawn == SampledToken(2, own[2], ((0, own[0]), (1, own[1])))


def test_a_guide_allows_only_its_tokens_and_comes_before_everything(sample: Sample) -> None:
    logits = torch.zeros(70)
    for tokens in ({0, 31, 32, 63, 69}, {31}, {63}, set(range(70))):
        row = {"seed": 1, "logit_bias": tuple((i, 100.0) for i in range(70) if i not in tokens)}
        mask = _mask(*tokens, words=3)
        seen = {
            _greedy(sample, SamplingInput(SamplingParams(**row), [0] * i, 1, (), mask), logits)  # type: ignore[arg-type]
            for i in range(1, 800 if len(tokens) > 5 else 60)
        }
        assert seen == tokens
    assert _greedy(sample, SamplingInput(SamplingParams(temperature=0), [], 0, (), _mask(2, 3))) == 2


def test_a_guide_is_of_its_own_row(sample: Sample) -> None:
    params = SamplingParams(temperature=0)
    rows = [SamplingInput(params, [], 0, (), mask) for mask in (None, _mask(3), None, _mask(1, 2))]
    assert [drawn.token for drawn in sample(LOGITS.expand(4, -1), rows)] == [0, 3, 0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_guide_that_allows_nothing_gives_no_token_and_hurts_no_other_row(sample: Sample, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, logprobs=1, typical_p=0.5)
    rows = [SamplingInput(params, [], 0), SamplingInput(params, [], 0, (), _mask())]
    assert sample(LOGITS.expand(2, -1), rows) == [sample(LOGITS[None], rows[:1])[0], SampledToken(None)]


@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_no_token_that_ends_the_text_is_drawn_before_min_tokens(sample: Sample, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=2)
    prompt = [3, 3]
    drawn = [_greedy(sample, SamplingInput(params, [*prompt, *[0] * n], 2, (0, 2, 99))) for n in range(4)]
    assert drawn == [1, 1, 0, 0]


def test_the_ban_gives_way_where_the_guide_allows_nothing_else(sample: Sample) -> None:
    params = SamplingParams(temperature=0, min_tokens=2)
    rows = [SamplingInput(params, [], 0, (0, 2), mask) for mask in (_mask(0, 2), _mask(0, 3), None)]
    assert [drawn.token for drawn in sample(LOGITS.expand(3, -1), rows)] == [0, 3, 1]
    assert _greedy(sample, SamplingInput(params, [], 0, (0, 1, 2, 3))) == 0


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-30, 1e30, 1e300])
def test_penalties_make_no_infinity(sample: Sample, penalty: float) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, 1e-45, -1e-45, -5.0]])
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, repetition_penalty=penalty, frequency_penalty=-2.0, logprobs=6)
        (drawn,) = sample(logits, [SamplingInput(params, [0, 1, 2, 3, 4, 5] * 2, 6)])
        assert drawn.token is not None
        assert all(math.isfinite(value) for _, value in drawn.top)


def test_choices_of_one_seed_go_ways_of_their_own(sample: Sample) -> None:
    logits = torch.zeros(1, 1000)
    rows = [SamplingInput(SamplingParams(seed=5, choice=choice), [0], 1) for choice in range(16)]
    drawn = [each.token for each in sample(logits.expand(16, -1), rows)]
    assert len(set(drawn)) > 12
    assert drawn[0] == sample(logits, [SamplingInput(SamplingParams(seed=5), [0], 1)])[0].token
