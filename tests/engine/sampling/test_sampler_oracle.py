"""5,000 generated rows on every executor of the specification: torch on the host, torch as on a device, C++, Triton.

No accepted input raises, other rows change no bit, and samples match the definition.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from app.common.types import SamplingParams
from app.engine.sampling.parameters import SamplingInput
from app.engine.sampling.sampled_token import SampledToken
from app.engine.sampling.sampler import FILTERS, Draw, apply_stages, row_parameters, uniforms
from benchmarks.gpu.conformance.sampler import draw
from benchmarks.gpu.conformance.sampling_cases import Case as BatchCase
from tests.support.engine import sampling_oracle
from tests.support.engine.native_sampler import Sample
from tests.support.engine.sampling_oracle import Survivors
from tests.support.gpu.kernel_backends import DEVICE, kernels, needs_triton

pytestmark = pytest.mark.slow

ROWS, CASES, ALONE = 20, 250, 5
VOCABS = [1, 2, 3, 31, 32, 33, 64, 100, 129, 300, 1000]
SCALES = [0.0, 1e-40, 1e-3, 1.0, 5.0, 30.0, 1e4, 1e37]


@dataclass(frozen=True, slots=True)
class Definition:
    """The oracle's result for one row."""

    adjusted: list[float]
    allowed: set[int]
    logprobs: list[float]
    survivors: Survivors | None
    """None: greedy."""
    token: int
    clear: bool
    """Whether rounding cannot decide otherwise."""


@dataclass(frozen=True, slots=True)
class Case:
    """Rows that are sampled together."""

    logits_SV: Tensor
    rows: list[SamplingInput]
    defined: list[Definition]


@dataclass
class Tally:
    """Counts comparisons, so that no assertion passes vacuously."""

    rows: int = 0
    predicted: int = 0
    guided: int = 0
    tokens: set[int] = field(default_factory=set)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """The cases, shared by the executors: the oracle is slower than all of them."""
    return [_case(number, share_guided=0.4) for number in range(CASES)]


def test_every_accepted_row_is_sampled_as_defined_in_any_batch(sample: Sample, cases: list[Case]) -> None:
    tally = Tally()
    for number, case in enumerate(cases):
        _check(sample, case, tally, alone=[(number + i) % ROWS for i in range(ALONE)])
    assert tally.rows == ROWS * CASES == 5000
    assert tally.predicted > 0.6 * tally.rows, "rounding must decide few rows only"
    assert tally.guided > 0.2 * tally.rows and len(tally.tokens) > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_filters_keep_the_tokens_of_the_definition(dtype: torch.dtype, cases: list[Case]) -> None:
    compared = 0
    for case in cases:
        drawn = [(row, d) for row, d in zip(case.rows, case.defined, strict=True) if d.survivors and d.survivors.clear]
        if not drawn:
            continue
        parameters = row_parameters([row for row, _ in drawn], case.logits_SV.shape[1], "cpu")
        adjusted_SV = torch.tensor([definition.adjusted for _, definition in drawn], dtype=dtype)
        weights_SV = apply_stages(adjusted_SV, parameters, FILTERS).weights_SV
        for (_, definition), weights_V in zip(drawn, weights_SV, strict=True):
            assert definition.survivors
            kept, defined = set(weights_V.nonzero().flatten().tolist()), definition.survivors.weights
            # A token whose weight float32 rounds to 0 does not survive.
            assert {token for token, weight in defined.items() if weight > 1e-35} <= kept <= set(defined)
        compared += len(drawn)
    assert compared > 0.4 * ROWS * CASES, "rounding must decide few rows only"


@pytest.mark.parametrize(("kind", "most"), [("torch", 80), pytest.param("triton", 2, marks=needs_triton)])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_device_samples_every_supported_row_as_defined(kind: str, most: int) -> None:
    """Rows without a grammar; Triton's interpreter takes a few of the short ones."""
    tally, sampler = Tally(), kernels(kind).sample

    def sample(logits_SV: Tensor, rows: Items[SamplingInput]) -> list[SampledToken]:
        return draw(sampler, BatchCase(name="", logits_SV=logits_SV, rows=rows), DEVICE)[0]

    vocabs = VOCABS if kind == "torch" else [vocab for vocab in VOCABS if 2 < vocab < 200]
    for number in range(most):
        _check(sample, _case(number, share_guided=0.0, vocabs=vocabs), tally, alone=range(2))
    assert tally.predicted > 0.4 * ROWS * most


def _check(sample: Sample, case: Case, tally: Tally, alone: Items[int]) -> None:
    logits_SV, rows = case.logits_SV, case.rows
    before = logits_SV.clone()
    together = sample(logits_SV, rows)
    assert torch.equal(logits_SV, before), "the caller's logits stay as they are"
    # Alone, and in another batch.
    half = len(rows) // 2
    assert [together[i] for i in alone] == [sample(logits_SV[i : i + 1], rows[i : i + 1])[0] for i in alone]
    assert together[half:] == sample(logits_SV[half:], rows[half:])
    for drawn, row, defined, logits in zip(together, rows, case.defined, logits_SV.tolist(), strict=True):
        assert drawn.token in defined.allowed
        assert drawn.logprob is not None and math.isfinite(drawn.logprob) and drawn.logprob <= 0
        assert dict(drawn.top).get(drawn.token, drawn.logprob) == drawn.logprob
        assert list(drawn.top) == sorted(drawn.top, key=lambda pair: (-pair[1], pair[0]))
        _check_logprobs(drawn, row.params.logprobs or 0, logits, defined.logprobs)
        tally.rows += 1
        tally.guided += row.allowed is not None
        tally.tokens.add(drawn.token)
        tally.predicted += defined.clear
        assert drawn.token == defined.token or not defined.clear


def _check_logprobs(drawn: SampledToken, count: int, logits: list[float], exact: list[float]) -> None:
    """Log-probabilities come from the model's logits before any adjustment; ties list the lower id first."""
    assert len(drawn.top) == min(count, len(logits))
    for token, logprob in ((drawn.token, drawn.logprob), *drawn.top):
        assert logprob == pytest.approx(exact[token or 0], rel=1e-4, abs=1e-4)
    if not drawn.top:
        return
    last = drawn.top[-1][0]
    for token in {*range(len(logits))} - {*dict(drawn.top)}:
        is_equal = logits[token] == logits[last]
        assert token > last if is_equal else exact[token] <= exact[last] + 1e-4 * (1 + abs(exact[last]))


def _case(number: int, *, share_guided: float, vocabs: Items[int] = VOCABS) -> Case:
    rng = random.Random(number)
    vocab = rng.choice(vocabs)
    logits_SV = _logits(vocab, rng)
    rows = [_row(vocab, rng, is_guided=rng.random() < share_guided) for _ in range(ROWS)]
    return Case(logits_SV, rows, [_definition(row, logits_V) for row, logits_V in zip(rows, logits_SV, strict=True)])


def _definition(row: SamplingInput, logits_V: Tensor) -> Definition:
    logits = logits_V.tolist()
    adjusted, allowed = sampling_oracle.adjusted(logits, row), sampling_oracle.allowed_tokens(row, len(logits))
    logprobs = logits_V.double().log_softmax(-1).tolist()
    if row.is_greedy:
        return Definition(adjusted, allowed, logprobs, None, adjusted.index(max(adjusted)), clear=True)
    survivors = sampling_oracle.survivors(adjusted, row.params)
    (number,) = uniforms([Draw(row.params.seed, row.position, row.params.choice)])
    token, clear = sampling_oracle.drawn(survivors, 0.0 if row.params.top_p == 0 else number)
    return Definition(adjusted, allowed, logprobs, survivors, token, clear)


def _logits(vocab: int, rng: random.Random) -> Tensor:
    """Each row has its own scale; half of the rows have many ties."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    scales = torch.tensor(SCALES)[torch.randint(len(SCALES), (ROWS, 1), generator=generator)]
    logits_SV = torch.randn(ROWS, vocab, generator=generator) * scales
    coarse = torch.rand(ROWS, 1, generator=generator) < 0.5
    return logits_SV.bfloat16().float().where(coarse, logits_SV)


def _row(vocab: int, rng: random.Random, *, is_guided: bool) -> SamplingInput:
    def some(most: int) -> list[int]:
        return rng.choices(range(vocab), k=rng.randint(0, most))

    prompt, allowed = [0, *some(20)], None
    if is_guided:
        bits = torch.zeros(-(-vocab // 32) * 32, dtype=torch.int64)
        bits[[rng.randrange(vocab), *some(40)]] = 1
        words = (bits.view(-1, 32) << torch.arange(32)).sum(-1)
        allowed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).numpy()
    return SamplingInput(_params(rng), [*prompt, *some(6)], len(prompt), tuple(some(3)), allowed)


def _params(rng: random.Random) -> SamplingParams:
    """Any sampling fields that a request may have."""

    def number(least: float, most: float, *extremes: float) -> float:
        between = max(least, rng.uniform(least, most) * rng.choice([1, 1, 1e-3, 1e-9]))
        return rng.choice([between, rng.choice([least, most, *extremes])])

    tokens, biases = [0, 1, 2, 63, 64, 299, 10**6, 2**62], [-100.0, 100.0, 1.5]
    return SamplingParams(
        temperature=number(0.0, 10.0, 5e-324, 1e-300, 1e-45, 1e-5, 0.8, 1.0, 1.0),
        top_k=rng.choice([0, 0, 1, 2, 5, 50, 64, 65, 200, 2**31 - 1]),
        top_p=number(0.0, 1.0, 5e-324, 0.5, 0.9, 1.0, 1.0, 1 - 2**-53),
        min_p=number(0.0, 1.0, 0.0, 0.0, 0.05, 5e-324),
        typical_p=number(5e-324, 1.0, 0.2, 0.9, 1.0, 1.0, 1 - 2**-53),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2, 0.7, 2.0, 5e-324, 1e-300, 1e300]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5, -2.0, 2.0]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.3, -2.0, 2.0]),
        logit_bias=tuple({rng.choice(tokens): rng.choice(biases) for _ in range(rng.randint(0, 4))}.items()),
        min_tokens=rng.choice([0, 0, 3, 2**31 - 1]),
        seed=rng.choice([0, -(2**63), 2**63 - 1, 7, 8, 9]),
        choice=rng.choice([0, 1, 2**31 - 1]),
        logprobs=rng.choice([0, 1, 5, 20]),
    )
