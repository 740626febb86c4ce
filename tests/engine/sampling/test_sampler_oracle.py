"""5,000 generated rows on every executor of the specification: torch on the host, torch as on a device, C++, Triton.

No accepted input raises, no other row changes a bit, and samples match the definition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from app.common.types import SampledToken, SamplingParams
from app.engine.sampling.parameters import SamplingInput
from app.engine.sampling.sampler import FILTERS, Draw, apply_stages, row_parameters, uniforms
from benchmarks.gpu.conformance.sampler import draw
from benchmarks.gpu.conformance.sampling_cases import Case as BatchCase
from tests.support.engine import sampling_oracle
from tests.support.engine.native_sampler import Sample
from tests.support.gpu.kernel_backends import DEVICE, kernels, needs_triton

pytestmark = pytest.mark.slow

ROWS, EXAMPLES = 20, 250
Case = tuple[list[SamplingParams], int, int]
"""The parameters of rows that are drawn together, the vocabulary, and the seed of all else."""
VOCABS = [1, 2, 3, 31, 32, 33, 64, 100, 129, 300, 1000]
SCALES = [0.0, 1e-40, 1e-3, 1.0, 5.0, 30.0, 1e4, 1e37]


def _number(least: float, most: float, *extremes: float) -> st.SearchStrategy[float]:
    return st.one_of(st.sampled_from([least, most, *extremes]), st.floats(least, most))


PARAMS = st.builds(
    SamplingParams,
    temperature=_number(0.0, 10.0, 5e-324, 1e-300, 1e-45, 1e-5, 0.8, 1.0, 1.0),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 50, 64, 65, 200, 2**31 - 1]),
    top_p=_number(0.0, 1.0, 5e-324, 0.5, 0.9, 1.0, 1.0, 1 - 2**-53),
    min_p=_number(0.0, 1.0, 0.0, 0.0, 0.05, 5e-324),
    typical_p=_number(5e-324, 1.0, 0.2, 0.9, 1.0, 1.0, 1 - 2**-53),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2, 0.7, 2.0, 5e-324, 1e-300, 1e300]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5, -2.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -2.0, 2.0]),
    logit_bias=st.dictionaries(
        st.sampled_from([0, 1, 2, 63, 64, 299, 10**6, 2**62]), st.sampled_from([-100.0, 100.0, 1.5]), max_size=4
    ).map(lambda biases: tuple(biases.items())),
    min_tokens=st.sampled_from([0, 0, 3, 2**31 - 1]),
    seed=st.sampled_from([0, -(2**63), 2**63 - 1, 7, 8, 9]),
    choice=st.sampled_from([0, 1, 2**31 - 1]),
    logprobs=st.sampled_from([0, 1, 5, 20]),
)
CASES = st.tuples(st.lists(PARAMS, min_size=ROWS, max_size=ROWS), st.sampled_from(VOCABS), st.integers(0, 2**31))


@dataclass
class Tally:
    """How much was compared, so that the properties cannot hold vacuously."""

    rows: int = 0
    predicted: int = 0
    compared: int = 0
    guided: int = 0
    tokens: set[int] = field(default_factory=set)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Shared by all executors: generating the cases takes as long as checking them."""
    made: list[Case] = []

    @settings(max_examples=EXAMPLES, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(CASES)
    def make(case: Case) -> None:
        made.append(case)

    make()
    return made


def test_every_accepted_row_is_drawn_as_defined_whatever_its_company(sample: Sample, cases: list[Case]) -> None:
    tally = Tally()
    for logits_SV, rows in map(_rows, cases):
        _check(sample, logits_SV, rows, tally)
    assert tally.rows >= 5000
    assert min(tally.predicted, tally.compared) > 0.6 * tally.rows, "rounding may not be the excuse for most rows"
    assert tally.guided > 0.2 * tally.rows and len(tally.tokens) > 100


@pytest.mark.parametrize(("kind", "most"), [("torch", 80), pytest.param("triton", 3, marks=needs_triton)])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_device_draws_every_row_that_fits_as_defined(kind: str, most: int, cases: list[Case]) -> None:
    """Rows without a grammar; Triton's interpreter takes a few of the short ones."""
    tally, sampler = Tally(), kernels(kind).sample

    def sample(logits_SV: Tensor, rows: Items[SamplingInput]) -> list[SampledToken]:
        return draw(sampler, BatchCase(name="", logits_SV=logits_SV, rows=rows), DEVICE)[0]

    chosen = [case for case in cases if kind == "torch" or 2 < case[1] < 200][:most]
    for logits_SV, rows in map(_rows, chosen):
        _check(sample, logits_SV, [structs.replace(row, allowed=None) for row in rows], tally, alone=2)
    assert min(tally.predicted, tally.compared) > 0.4 * ROWS * most


def _check(sample: Sample, logits_SV: Tensor, rows: list[SamplingInput], tally: Tally, alone: int = ROWS) -> None:
    before = logits_SV.clone()
    together = sample(logits_SV, rows)
    assert torch.equal(logits_SV, before), "the caller's logits stay as they are"
    # Alone, and in other company.
    half = len(rows) // 2
    assert together[:alone] == [sample(logits_SV[i : i + 1], rows[i : i + 1])[0] for i in range(alone)]
    assert together[half:] == sample(logits_SV[half:], rows[half:])
    for drawn, row, logits in zip(together, rows, logits_SV.tolist(), strict=True):
        assert drawn.token is not None and 0 <= drawn.token < len(logits)
        assert drawn.token in sampling_oracle.allowed_tokens(row, len(logits))
        assert drawn.logprob is not None and math.isfinite(drawn.logprob) and drawn.logprob <= 0
        assert dict(drawn.top).get(drawn.token, drawn.logprob) == drawn.logprob
        assert list(drawn.top) == sorted(drawn.top, key=lambda pair: (-pair[1], pair[0]))
        _check_logprobs(drawn, row, logits)
        tally.rows += 1
        tally.guided += row.allowed is not None
        tally.tokens.add(drawn.token)
        _compare(drawn.token, sampling_oracle.adjusted(logits, row), row, tally)


def _check_logprobs(drawn: SampledToken, row: SamplingInput, logits: list[float]) -> None:
    """The model's own, whatever was added to the logits before the draw; the lower id first among equals."""
    exact = torch.tensor(logits, dtype=torch.float64).log_softmax(-1).tolist()
    assert len(drawn.top) == min(row.params.logprobs or 0, len(logits))
    for token, logprob in ((drawn.token, drawn.logprob), *drawn.top):
        assert logprob == pytest.approx(exact[token or 0], rel=1e-4, abs=1e-4)
    if not drawn.top:
        return
    last = drawn.top[-1][0]
    for token in {*range(len(logits))} - {*dict(drawn.top)}:
        is_equal = logits[token] == logits[last]
        assert token > last if is_equal else exact[token] <= exact[last] + 1e-4 * (1 + abs(exact[last]))


def _compare(token: int, logits: list[float], row: SamplingInput, tally: Tally) -> None:
    if row.is_greedy:
        assert token == logits.index(max(logits))
        tally.predicted += 1
        tally.compared += 1
        return
    survivors = sampling_oracle.survivors(logits, row.params)
    if survivors.clear:
        tally.compared += 1
        for dtype in (torch.float32, torch.float64):
            parameters = row_parameters([row], len(logits), "cpu")
            weights_1V = apply_stages(torch.tensor([logits], dtype=dtype), parameters, FILTERS).weights_SV
            kept = weights_1V[0].nonzero().flatten().tolist()
            # A weight that float32 rounds to 0 is no survivor.
            assert set(kept) <= set(survivors.weights)
            assert set(kept) >= {each for each, weight in survivors.weights.items() if weight > 1e-35}
    (number,) = uniforms([Draw(row.params.seed, row.position, row.params.choice)])
    expected, clear = sampling_oracle.drawn(survivors, 0.0 if row.params.top_p == 0 else number)
    if clear:
        tally.predicted += 1
        assert token == expected


def _rows(case: Case) -> tuple[Tensor, list[SamplingInput]]:
    params, vocab, seed = case
    generator = torch.Generator().manual_seed(seed)
    return _logits(len(params), vocab, generator), [_row(each, vocab, generator) for each in params]


def _logits(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Each row on a scale of its own; half of them with many ties."""
    scales = torch.tensor(SCALES)[torch.randint(len(SCALES), (rows, 1), generator=generator)]
    logits_SV = torch.randn(rows, vocab, generator=generator) * scales
    coarse = torch.rand(rows, 1, generator=generator) < 0.5
    return logits_SV.bfloat16().float().where(coarse, logits_SV)


def _row(params: SamplingParams, vocab: int, generator: torch.Generator) -> SamplingInput:
    def some(most: int) -> list[int]:
        count = int(torch.randint(most + 1, (), generator=generator))
        return torch.randint(vocab, (count,), generator=generator).tolist()

    prompt, allowed = [0, *some(20)], None
    if torch.rand((), generator=generator) < 0.4:
        bits = torch.zeros(-(-vocab // 32) * 32, dtype=torch.int64)
        bits[[int(torch.randint(vocab, (), generator=generator)), *some(40)]] = 1
        words = (bits.view(-1, 32) << torch.arange(32)).sum(-1)
        allowed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).numpy()
    return SamplingInput(params, [*prompt, *some(6)], len(prompt), tuple(some(3)), allowed)
