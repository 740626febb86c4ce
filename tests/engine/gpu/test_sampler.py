"""Sampling on a device draws what app/engine/sampling/sampler.py draws: in plain torch and by Triton (interpreted)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from app.common.types import Request, SamplingParams
from app.engine.gpu.kernels.sample_out import SampleOut
from app.engine.gpu.kernels.sampling_table import SamplingTable
from app.engine.sampling import parameters as layout
from app.engine.sampling.parameters import SamplingInput, pack_request
from app.engine.sampling.sampler import Draw
from app.engine.sampling.sampler import sample as oracle
from app.engine.sampling.sampler import uniforms as plain_uniforms
from benchmarks.gpu.conformance.sampler import draw, wrong
from benchmarks.gpu.conformance.sampling_cases import FULL, Case, chance, edges
from benchmarks.gpu.reference_kernels import device_uniforms
from model.number_formats import Array
from tests.support.gpu.kernel_backends import BOTH, DEVICE, kernels, needs_triton

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Values that overflow as intended: numpy warns, a GPU does not.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EDGES, MANY_TILES = ({case.name: case for case in edges(*given)} for given in ((70, 1), (200, 3)))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", EDGES)
def test_ties_and_extreme_values_are_sampled_as_specified(name: str, kind: str) -> None:
    """Triton takes half of the rows for each kind of logits, in turns; a GPU takes all."""
    case = _some(EDGES[name], list(EDGES).index(name) % 2, 2) if kind == "triton" else EDGES[name]
    assert not list(wrong(kernels(kind).sample, case, DEVICE, exact=True))


@pytest.mark.parametrize(
    ("kind", "vocab", "dtype"),
    [
        *(("torch", *each) for each in zip((1, 50, 129, 300, 1025, 128), 2 * DTYPES, strict=True)),
        pytest.param("triton", 2, torch.float32, marks=needs_triton),
        pytest.param("triton", 50, torch.bfloat16, marks=needs_triton),
    ],
    ids=str,
)
def test_every_kind_of_row_is_sampled_as_specified(kind: str, vocab: int, dtype: torch.dtype) -> None:
    case = chance("chance", vocab, 60 if kind == "torch" else 16, vocab + 1, dtype=dtype)
    assert not list(wrong(kernels(kind).sample, case, DEVICE, exact=True))


@pytest.mark.parametrize("name", ["chance", "equal", "few values"])
def test_row_of_many_tiles_with_candidates_beyond_scratch_is_sampled_as_specified(name: str) -> None:
    """Rows of 128,256 logits take this path; here with buffers for 64."""
    module = pytest.importorskip("app.engine.gpu.kernels.triton.sampler", reason="Triton is not installed")
    small = partial(module.sample, sizes=module.SamplerTiling(tile=64, groups=4, scratch=64))
    case = chance(name, 260, 16, 3) if name == "chance" else _some(MANY_TILES[name], len(name) % 2, 3)
    assert not list(wrong(small, case, DEVICE, exact=True))


def test_row_program_only_searches_the_weights_of_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without filters, or with min_p, it reads the weights of one tile: the one with the token. No logits are read."""
    module = pytest.importorskip("app.engine.gpu.kernels.triton.sampler", reason="Triton is not installed")
    tile, kernel = 64, module.sample_kernel
    small = partial(module.sample, sizes=module.SamplerTiling(tile=tile, groups=4, scratch=64))
    every = chance("plain", 260, 16, 4)
    params = [SamplingParams(seed=seed, min_p=0.05 * (seed % 2), temperature=0.5 + seed) for seed in range(4)]
    rows = [SamplingInput(each, [1, 2], 1) for each in params]
    case = Case(name="plain", logits_SV=every.logits_SV[: len(rows)], rows=rows)
    tokens = [sampled.token or 0 for sampled in draw(small, case, DEVICE)[0]]
    poisoned: list[int] = []

    class Poisoning:
        """Runs the kernel after inputs that it does not need were overwritten."""

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **options: Any) -> None:
                x_SV, weights_SV = args[5:7]
                x_SV.fill_(torch.nan)
                for row, token in enumerate(tokens):
                    keep = weights_SV[row, token // tile * tile :][:tile].clone()
                    weights_SV[row].fill_(torch.nan)
                    weights_SV[row, token // tile * tile :][:tile] = keep
                    poisoned.append(row)
                kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(module, "sample_kernel", Poisoning())
    assert [sampled.token for sampled in draw(small, case, DEVICE)[0]] == tokens and len(poisoned) == len(rows)
    assert len({token // tile for token in tokens}) > 1


@pytest.mark.parametrize("kind", BOTH)
def test_row_has_the_same_bits_alone_and_in_any_batch(kind: str) -> None:
    case = chance("chance", 300, 8, 5)
    rows = range(0, 8, 3)
    together, _, _ = draw(kernels(kind).sample, case, DEVICE)
    alone = [Case(name="alone", logits_SV=case.logits_SV[i : i + 1], rows=case.rows[i : i + 1]) for i in rows]
    assert [draw(kernels(kind).sample, each, DEVICE)[0][0] for each in alone] == [together[i] for i in rows]


@pytest.mark.parametrize("kind", BOTH)
def test_counts_of_earlier_steps_affect_later_ones(kind: str) -> None:
    """Four steps without input from the host; then a second request takes over the row."""
    table = SamplingTable(3, 20, DEVICE)
    for seed in (1, 2):
        params = SamplingParams(seed=seed, repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=0.5)
        tokens = [3, 4, 4, 5]
        _load(table, 1, Request(id="", prompt=tuple(tokens[:2]), max_tokens=9, params=params), tokens)
        for step in range(4):
            logits_SV = torch.randn(1, 20, generator=torch.Generator().manual_seed(10 * seed + step))
            out = SampleOut.empty(2, DEVICE)
            kernels(kind).sample(logits_SV.to(DEVICE), _ints(1), _ints(len(tokens)), table, out.first(1))
            expected = oracle(logits_SV, [SamplingInput(params, tokens, 2)])[0].token
            assert out.tokens_S.tolist() == [expected, -1] and expected is not None
            tokens.append(expected)


@pytest.mark.parametrize("kind", BOTH)
def test_padding_has_no_effect(kind: str) -> None:
    case = chance("chance", 50, 6, 8)
    _, table, rows_S = draw(kernels(kind).sample, case, DEVICE)
    trash = len(table.words_RW) - 1
    assert trash not in rows_S.tolist()
    assert torch.equal(table.words_RW[trash], SamplingTable(1, 50, DEVICE).words_RW[0])
    assert not table.counts_RV[trash].any()


def test_device_random_numbers_equal_those_of_the_host() -> None:
    ends = itertools.product((-(2**63), -1, 0, 2**63 - 1, 12345), (0, 1, 2**31 - 1), (0, 7, 2**31 - 1, 2**40))
    draws = [Draw(seed, position, choice) for seed, choice, position in ends]
    seeds = torch.tensor([draw.seed for draw in draws]).view(torch.int32).view(-1, 2)
    choices, positions = (torch.tensor([draw[i] for draw in draws]) for i in (2, 1))
    assert device_uniforms(seeds[:, 0], seeds[:, 1], choices, positions).tolist() == plain_uniforms(draws)


def test_mask_excludes_end_tokens_before_min_tokens_unless_no_other_is_allowed() -> None:
    def tokens(n_generated: int, *stop_ids: int, allowed: tuple[int, ...] = tuple(range(70))) -> list[int]:
        params = SamplingParams(min_tokens=2)
        request = Request(id="", prompt=(0,), max_tokens=9, params=params, stop_ids=stop_ids, grammar="any")
        mask = layout.token_mask(request, n_generated, 70, _bits(allowed, 70))
        return [token for token in range(70) if mask[token // 32] >> token % 32 & 1]

    def _bits(ids: tuple[int, ...], vocab: int) -> Array:
        words = [sum(1 << i % 32 for i in ids if i // 32 == word) for word in range(layout.mask_words(vocab))]
        return np.array(words, np.uint32).view(np.int32)

    assert tokens(1, 31, 63, 69, 1000) == [i for i in range(69) if i not in (31, 63)]
    assert tokens(2, 31, 63) == [*range(70)]
    assert tokens(0, *range(70)) == [*range(70)], "all tokens are end tokens"
    assert tokens(0, 5, 69, allowed=(5, 69)) == [5, 69] and tokens(0, 5, allowed=(5, 69)) == [69]


@pytest.mark.parametrize("kind", BOTH)
def test_masked_row_samples_tokens_that_its_grammar_allows(kind: str) -> None:
    case = chance("masked", 300, 8, 11)
    generator = torch.Generator().manual_seed(2)
    masks = [torch.randint(-(2**31), 2**31, (10,), generator=generator).to(torch.int32) for _ in case.rows]
    masks[0] = torch.zeros(10, dtype=torch.int32)
    masks[0][4] = 1 << 7
    masks[1] = torch.zeros(10, dtype=torch.int32)
    rows = [replace(row, allowed=mask.numpy(), stop_ids=(3, 40)) for row, mask in zip(case.rows, masks, strict=True)]
    masked = Case(name="masked", logits_SV=case.logits_SV, rows=rows)
    assert not list(wrong(kernels(kind).sample, masked, DEVICE, exact=True))
    tokens = [sample.token for sample in draw(kernels(kind).sample, masked, DEVICE)[0]]
    assert tokens[:2] == [4 * 32 + 7, None], "one allowed token remains, or none"


@pytest.mark.parametrize("kind", BOTH)
def test_given_token_is_scored_like_a_sampled_one(kind: str) -> None:
    """Equal to the bit, except where logits are non-finite."""
    logits_SV = torch.randn(4, 300, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    logits_SV[2, 7] = float("nan")
    table, scored = SamplingTable(5, 300, DEVICE, logprobs=20), SampleOut.empty(4, DEVICE)
    sampled = SampleOut.empty(4, DEVICE)
    kernels(kind).sample(logits_SV, _ints(0, 1, 2, 3), _ints(0, 0, 0, 0), table, sampled)
    kernels(kind).sample(logits_SV, _ints(0, 0, 0, 0), _ints(0, 0, 0, 0), table, scored, sampled.tokens_S.clamp(min=0))
    assert scored.scores([20] * 4) == sampled.scores([20] * 4) and sampled.tokens_S[2] == -1
    kernels(kind).sample(logits_SV, _ints(0, 0, 0, 0), _ints(0, 0, 0, 0), table, scored, _ints(7, 8, 9, 10))
    expected = logits_SV.cpu().double().log_softmax(-1)
    assert scored.tokens_S.tolist() == [7, 8, -1, 10]
    assert all(abs(float(scored.logprob_S[i]) - float(expected[i, 7 + i])) < 1e-5 for i in (0, 1, 3))


@pytest.mark.parametrize("what", ["instead of", "log-probability", "counted", "most likely"])
def test_sampler_with_different_results_is_detected(what: str) -> None:
    def altered(logits_SV: Tensor, rows_S: Tensor, positions_S: Tensor, table: SamplingTable, out: SampleOut) -> None:
        kernels("torch").sample(logits_SV, rows_S, positions_S, table, out)
        if what == "instead of":
            out.tokens_S[0] = (out.tokens_S[0] + 1) % 50
        elif what == "log-probability":
            out.logprob_S[0] -= 0.001
        elif what == "counted":
            table.counts_RV[rows_S[0].long(), 7] += 1
        else:
            out.top_ids_SN[0, -1] = int(logits_SV[0].argmin())
            out.top_logprobs_SN[0, -1] = logits_SV[0].log_softmax(-1).amin()

    logits_SV = torch.randn(1, 50, generator=torch.Generator().manual_seed(1), device="cpu")
    lines = list(wrong(altered, Case(name="one", logits_SV=logits_SV, rows=[SamplingInput(FULL, [3, 4], 1)]), DEVICE))
    assert any(what in line for line in lines)


def _some(case: Case, first: int, step: int) -> Case:
    """Every `step`-th row, if there are many."""
    if len(case.rows) < 10:
        return case
    return Case(name=case.name, logits_SV=case.logits_SV[first::step], rows=case.rows[first::step])


def _ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def _load(table: SamplingTable, row: int, request: Request, tokens: list[int]) -> None:
    words_NW = torch.tensor([pack_request(request, table.vocab_size).tolist()], dtype=torch.int32, device=DEVICE)
    is_generated_X = torch.arange(len(tokens), device=DEVICE) >= len(request.prompt)
    table.load(_ints(row), words_NW, _ints(*tokens), _ints(*[row] * len(tokens)), is_generated_X)
