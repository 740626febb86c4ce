"""The sampler: filters, penalties and random numbers in hand-made cases; test_sampler_oracle.py generates more."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from app.common.types import SamplingParams
from app.engine.sampling.parameters import SamplingInput
from app.engine.sampling.sampled_token import SampledToken
from app.engine.sampling.sampler import Draw, TorchSampler, philox, top_logprobs, uniforms
from app.engine.sampling.sampler import sample as sample_together
from tests.support.engine.native_sampler import Sample

LOGITS = torch.tensor([3.0, 2.0, 1.0, -1.0])
# Known answers of philox4x32-10 from the Random123 distribution: counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _row(params: SamplingParams, position: int = 0) -> SamplingInput:
    """Only the length counts: without penalties the sampler does not read the tokens."""
    return SamplingInput(params, range(position), position)


def _draw(sample: Sample, logits: torch.Tensor, params: SamplingParams, position: int = 0) -> int:
    token = sample(logits[None], [_row(params, position)])[0].token
    assert token is not None
    return token


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
def test_filters_keep_the_right_tokens(sample: Sample, params: dict[str, float], allowed: set[int]) -> None:
    """Probabilities 0.5, 0.25, 0.15, 0.10; after top_k 3 they are 0.56, 0.28, 0.17, so that 0.8 needs two."""
    logits = torch.tensor([0.5, 0.25, 0.15, 0.10]).log()
    seen = {_draw(sample, logits, SamplingParams(seed=3, **params), position) for position in range(400)}  # type: ignore[arg-type]
    assert seen == allowed


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 0.0, "typical_p": 0.99}])
def test_top_k_of_one_is_greedy_even_with_ties(sample: Sample, params: dict[str, Any]) -> None:
    logits = torch.tensor([0.0, 2.0, 2.0])
    assert {_draw(sample, logits, SamplingParams(seed=1, **params), position) for position in range(50)} == {1}


def test_nucleus_wider_than_the_first_candidates_is_exact(sample: Sample) -> None:
    logits = torch.zeros(3000)
    logits[:1000] = 1.0
    seen = {_draw(sample, logits, SamplingParams(top_p=0.5, seed=2), position) for position in range(300)}
    assert max(seen) < 1000 and len(seen) > 200


@pytest.mark.parametrize(
    "params", [{}, {"logprobs": 3}, {"temperature": 0.0, "logprobs": 0}, {"top_k": 5, "top_p": 0.5}]
)
def test_non_finite_row_gives_no_token_and_affects_no_other_row(sample: Sample, params: dict[str, Any]) -> None:
    logits = torch.randn(3, 50)
    rows = [_row(SamplingParams(seed=i, **params)) for i in range(3)]
    clean = sample(logits, rows)
    for poison in (math.nan, math.inf, -math.inf):
        broken = logits.clone()
        broken[1, 7] = poison
        drawn = sample(broken, rows)
        assert drawn[1].token is None
        assert (drawn[0], drawn[2]) == (clean[0], clean[2])


def test_rows_are_batch_invariant_for_vocabularies_of_many_sizes(sample: Sample) -> None:
    """Long rows are summed in shares by threads, short ones are not; neither may affect the results."""
    filters = {"top_k": 50, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.01}
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"typical_p": 0.5}, filters, {"min_p": 0.1}, {"temperature": 0}]
    for vocab in (4096, 50_257, 60_000):
        logits = torch.randn(len(kinds), vocab, generator=torch.Generator().manual_seed(vocab)) * 3
        rows = [_row(SamplingParams(seed=i, logprobs=20, **kind), i) for i, kind in enumerate(kinds)]
        together = sample(logits, rows)
        assert together == [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]


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
        # logit_bias; ids beyond the vocabulary have no effect.
        ([], 0, {"logit_bias": ((3, 5.0), (9, 100.0), (2**62, 1.0))}, 3),
        ([], 0, {"logit_bias": ((0, -100.0), (1, -100.0))}, 2),
        # Order: first the bias, then the penalty on the result, (3 + 3) / 2 < 2 + 1.5.
        ([0], 1, {"logit_bias": ((0, 3.0), (1, 1.5)), "repetition_penalty": 2.0}, 1),
        # repetition before presence: 3 / 2 - 1 < 1; the other way round it would be (3 - 1) / 2 = 1, and the lowest id.
        ([1, 0], 0, {"repetition_penalty": 2.0, "presence_penalty": 1.0}, 2),
    ],
)
def test_biases_and_penalties_follow_their_formulas(
    sample: Sample, tokens: list[int], n_prompt: int, params: dict[str, Any], best: int
) -> None:
    row = SamplingInput(SamplingParams(temperature=0, **params), tokens, n_prompt)
    assert sample(LOGITS[None], [row])[0].token == best


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_empty_mask_gives_no_token_and_affects_no_other_row(sample: Sample, temperature: float) -> None:
    params, nothing = SamplingParams(temperature=temperature, logprobs=1, typical_p=0.5), np.zeros(1, np.int32)
    rows = [SamplingInput(params, [], 0), SamplingInput(params, [], 0, (), nothing)]
    assert sample(LOGITS.expand(2, -1), rows) == [sample(LOGITS[None], rows[:1])[0], SampledToken(None)]


def test_end_tokens_wait_for_min_tokens_and_unknown_ids_have_no_effect(sample: Sample) -> None:
    params = SamplingParams(temperature=0, min_tokens=2, logit_bias=((4, 100.0),))
    rows = [SamplingInput(params, [3, 3, *[0] * n], 2, (0, 2, 4)) for n in range(4)]
    assert [drawn.token for drawn in sample(LOGITS.expand(4, -1), rows)] == [1, 1, 0, 0]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [2, 7, 99, 320, 4099])
def test_most_likely_tokens_equal_those_of_a_full_sort(vocab: int, dtype: torch.dtype) -> None:
    """In bfloat16 many are equal, also across the boundary of the reported ones."""
    logits = (4 * torch.randn(40, vocab, generator=torch.Generator().manual_seed(vocab))).to(dtype)
    chosen = torch.arange(40) % vocab
    for count in (0, 1, 5, 20):
        for row, (own, top) in enumerate(top_logprobs(logits, chosen, [count] * 40)):
            logprobs = logits[row].float().log_softmax(-1).tolist()
            best = sorted(enumerate(logprobs), key=lambda pair: (-pair[1], pair[0]))
            assert (list(top), own) == (best[:count], logprobs[chosen[row]])


def test_rows_sampled_in_pieces_equal_those_sampled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = 500
    logits_SV = torch.randn(7, vocab, generator=torch.Generator().manual_seed(4)) * 3
    kinds = ({"temperature": 0}, {"typical_p": 0.9, "logprobs": 3}, {"top_k": 9, "repetition_penalty": 1.2})
    rows = [SamplingInput(SamplingParams(seed=i, **kinds[i % 3]), [i, 2], 1) for i in range(7)]
    whole = TorchSampler().sample(logits_SV, rows)
    assert whole == sample_together(logits_SV, rows)
    for size in (1, 4 * vocab * 3):
        monkeypatch.setattr("app.engine.sampling.sampler._PIECE_BYTES", size)
        assert TorchSampler().sample(logits_SV, rows) == whole


def _side_by_side(words: tuple[int, ...]) -> int:
    return sum(word << 64 * lane for lane, word in enumerate(words))


def test_philox_gives_the_published_numbers_in_every_lane() -> None:
    counters, keys, results = (list(zip(*column, strict=True)) for column in zip(*VECTORS, strict=True))
    counter, key = tuple(map(_side_by_side, counters)), tuple(map(_side_by_side, keys))
    assert philox(counter, key, lanes=3) == tuple(map(_side_by_side, results))  # type: ignore[arg-type]


def test_each_seed_choice_and_position_has_its_own_random_number_in_any_batch() -> None:
    seeds = [0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63)]
    draws = [
        Draw(seed, position, choice) for seed in seeds for position in (0, 1, 2**20, 2**33) for choice in (0, 1, 15)
    ]
    together = uniforms(draws)
    assert len(set(together)) == len(draws)
    assert together == [number for draw in draws for number in uniforms([draw])]
    assert uniforms([]) == []


def test_random_number_has_53_bits_from_seed_choice_and_position() -> None:
    """Counter (position, 0, choice, 0), key (low seed word, high seed word), 53 bits of the first two words."""
    first, second, _, _ = philox((5, 0, 3, 0), (9, 1))
    assert uniforms([Draw(2**32 + 9, 5, 3)]) == [((first >> 5) * 2**26 + (second >> 6)) / 2**53]
