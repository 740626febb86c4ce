"""The native sampler against its reference on long rows, and on native-only edge cases; tests/engine/sampling has the
laws of both.
"""

from __future__ import annotations

import math
from array import array
from ctypes import CDLL, c_double, c_int64
from typing import Any

import numpy as np
import pytest
import torch

from app.common.types import SamplingParams
from app.engine.cpu.sampler import NativeSampler
from app.engine.sampling.parameters import SamplingInput
from app.engine.sampling.sampled_token import SampledToken
from app.engine.sampling.sampler import Draw, uniforms
from app.engine.sampling.sampler import sample as torch_sample
from benchmarks.gpu.conformance.sampling_cases import chance, edges
from tests.support.engine import sampling_oracle
from tests.support.engine.native_sampler import native_sample


def _agree(ours: SampledToken, theirs: SampledToken, row: SamplingInput, logits_V: torch.Tensor) -> bool:
    """Asserts the same token, or one that rounding may choose, and log-probabilities equal up to the last digits."""
    if ours.token != theirs.token:
        if ours.token is None or theirs.token is None:
            return False
        (number,) = uniforms([Draw(row.params.seed, row.position, row.params.choice)])
        survivors = sampling_oracle.survivors(sampling_oracle.adjusted(logits_V.tolist(), row), row.params)
        return not row.is_greedy and not sampling_oracle.drawn(survivors, 0.0 if row.params.top_p == 0 else number)[1]
    assert [ours.logprob or 0.0] == pytest.approx([theirs.logprob or 0.0], rel=1e-5, abs=1e-5)
    assert [x for _, x in ours.top] == pytest.approx([x for _, x in theirs.top], rel=1e-5, abs=1e-5)
    return True


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("vocab", [255, 4096, 50_257])
def test_native_and_reference_samplers_draw_the_same(sampling_library: CDLL, vocab: int, nightly: bool) -> None:
    """Hundreds of rows. Where they differ, the oracle must report that rounding decides, which is rare."""
    sample, seen, different = native_sample(sampling_library), 0, 0
    cases = [*edges(vocab, 1), *(chance("", vocab, 64, seed) for seed in range(50 if nightly else 2))]
    for case in cases:
        ours, theirs = sample(case.logits_SV, case.rows), torch_sample(case.logits_SV, case.rows)
        for a, b, row, logits_V in zip(ours, theirs, case.rows, case.logits_SV, strict=True):
            assert _agree(a, b, row, logits_V), (case.name, row.params)
            seen += 1
            different += a.token != b.token
    assert different <= seen * 0.01 and seen > 400


def test_rows_of_logits_may_overlap_or_have_gaps(sampling_library: CDLL) -> None:
    sample = native_sample(sampling_library)
    logits_SV = torch.randn(3, 100)
    rows = [SamplingInput(SamplingParams(seed=i, logprobs=2), [0], 1) for i in range(3)]
    expected = sample(logits_SV, rows)
    wide = torch.cat([logits_SV, torch.zeros(3, 7)], dim=1)
    assert sample(wide[:, :100], rows) == expected
    once = sample(logits_SV[:1], rows[:1]) + sample(logits_SV[:1], rows[1:2])
    assert sample(logits_SV[:1].expand(2, -1), rows[:2]) == once


def test_histories_and_masks_may_be_of_any_kind(sampling_library: CDLL) -> None:
    sample, logits = native_sample(sampling_library), torch.randn(1, 70)
    params = SamplingParams(seed=3, repetition_penalty=1.5, frequency_penalty=0.5, min_tokens=99)
    mask = np.array([-2, -1, -1, 0, 0, 0], np.int32)
    kinds: list[tuple[Any, Any, Any]] = [
        ([1, 2, 3], (7, 8), mask[:3]),
        ((1, 2, 3), [7, 8], mask),
        (range(1, 4), array("q", [7, 8]), mask.repeat(2)[::2]),
        (array("q", [1, 2, 3]), (8, 7, 8), mask[:3].copy()),
        (array("i", [1, 2, 3]), range(7, 9), mask[:3]),
    ]
    drawn = {sample(logits, [SamplingInput(params, tokens, 1, stops, words)])[0] for tokens, stops, words in kinds}
    assert len(drawn) == 1


def test_parameters_are_packed_once_while_in_use(sampling_library: CDLL) -> None:
    """A history grows in place; parameters at a reused address are not mistaken for the old ones."""
    sampler, logits = NativeSampler(sampling_library, 50), torch.randn(1, 50)
    params, history = SamplingParams(seed=1, presence_penalty=2.0, frequency_penalty=2.0), array("q", [0])
    row = SamplingInput(params, history, 1)
    for _ in range(30):
        (ours,) = sampler.sample(logits.numpy(), [row])
        assert ours.token == torch_sample(logits, [row])[0].token
        history.append(ours.token or 0)
    assert len(set(history)) > 20
    for i in range(200):
        biased = SamplingParams(temperature=0, logit_bias=((i % 50, 99.0),))
        assert sampler.sample(logits.numpy(), [SamplingInput(biased, [0], 1)])[0].token == i % 50


def test_rows_with_shared_parameters_keep_their_prompts_and_stop_ids(sampling_library: CDLL) -> None:
    logits_SV, params = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).expand(4, -1), SamplingParams(temperature=0, min_tokens=2)
    kinds: list[tuple[int, Any]] = [(3, (0,)), (3, (0, 1)), (1, (0, 1)), (3, (0,))]
    drawn = native_sample(sampling_library)(logits_SV, [SamplingInput(params, [3] * 3, *kind) for kind in kinds])
    assert [each.token for each in drawn] == [1, 2, 0, 1]


def test_sampler_handles_no_rows_and_then_many(sampling_library: CDLL) -> None:
    sampler = NativeSampler(sampling_library, 10)
    for n in (0, 1, 3, 200, 2):
        rows = [SamplingInput(SamplingParams(temperature=0, logprobs=20), [0], 1)] * n
        drawn = sampler.sample(np.zeros((n, 10), np.float32), rows)
        assert [each.token for each in drawn] == [0] * n and all(len(each.top) == 10 for each in drawn)


@pytest.mark.parametrize("vocab", [1, 320, 50_257])
def test_given_tokens_are_scored_accurately(sampling_library: CDLL, vocab: int) -> None:
    """Against float64: torch's own log_softmax of float32 is off by up to 7e-6 where it sums 50,257 numbers."""
    sampler = NativeSampler(sampling_library, vocab)
    rounded = torch.randn(20, vocab, generator=torch.Generator().manual_seed(vocab)).bfloat16()
    for logits_XV in (rounded.float() * 4, (rounded * 1e-40).float(), torch.zeros(20, vocab), rounded.float() * 1e37):
        chosen = [i % vocab for i in range(20)]
        exact_XV = logits_XV.double().log_softmax(-1)
        best_XN = exact_XV.topk(min(20, vocab), dim=-1).values.tolist()
        most = sampler.top_logprobs(logits_XV.numpy(), chosen, 20)
        assert most
        for (own, top), token, exact_V, best_N in zip(most, chosen, exact_XV, best_XN, strict=True):
            assert own == pytest.approx(float(exact_V[token]), rel=1e-6, abs=1e-7) and math.isfinite(own) and own <= 0
            assert [x for _, x in top] == pytest.approx(best_N, rel=1e-6, abs=1e-7)
            assert list(top) == sorted(top, key=lambda pair: (-pair[1], pair[0]))
            assert all(x == pytest.approx(float(exact_V[i]), rel=1e-6, abs=1e-7) for i, x in top)
            assert dict(top).get(token, own) == own
        for count in (0, 1, 5):
            assert sampler.top_logprobs(logits_XV.numpy(), chosen, count) == [(own, top[:count]) for own, top in most]


def test_ties_report_the_lowest_ids(sampling_library: CDLL) -> None:
    """Equal as reported log-probabilities: logits may differ by less than their last digit."""
    logits = torch.zeros(1, 4096)
    logits[0, 100:] = 1e-9
    ((own, top),) = NativeSampler(sampling_library, 4096).top_logprobs(logits.numpy(), [4000], 3) or ()
    assert [i for i, _ in top] == [0, 1, 2] and {x for _, x in top} == {own}


def test_native_random_numbers_equal_those_of_the_reference(sampling_library: CDLL) -> None:
    uniform = sampling_library.probe_uniform
    uniform.restype, uniform.argtypes = c_double, [c_int64] * 3
    for seed in (0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63)):
        for position in (0, 1, 2**20, 2**33):
            for choice in (0, 1, 2**31 - 1):
                assert uniform(seed, choice, position) == uniforms([Draw(seed, position, choice)])[0]


def test_exp_is_accurate(sampling_library: CDLL) -> None:
    x = torch.cat([-torch.logspace(-45, 2.3, 100_000), torch.zeros(16), torch.full((16,), -math.inf)])
    x = torch.nn.functional.pad(x, (0, -len(x) % 16))
    y = torch.empty_like(x)
    sampling_library.probe_exp.argtypes = [c_int64] * 3
    sampling_library.probe_exp(x.data_ptr(), y.data_ptr(), len(x))
    exact = x.double().exp()
    in_range = x >= -86
    ulp = torch.finfo(torch.float32).eps * 2.0 ** exact[in_range].log2().floor()
    assert float(((y[in_range].double() - exact[in_range]).abs() / ulp).max()) < 1.5
    assert (y[~in_range] == 0).all() and (y[x == 0] == 1).all()
