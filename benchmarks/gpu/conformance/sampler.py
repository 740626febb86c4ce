"""Sampling on the device, in plain torch and by Triton, against app/engine/sampling/sampler.py: the same tokens.

A token may differ from the reference's where rounding decides: where the random number lies so near the border between
two tokens that sums in another order may fall on either side. The reference samples each case once for both samplers,
since it takes rows one by one.

Shape legend: S rows, V vocabulary, N most likely tokens.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from random import Random

import torch
from torch import Tensor

from app.common.types import Request
from app.engine.gpu.kernels.sample_out import SampleOut, samples_of
from app.engine.gpu.kernels.sampling_table import SamplingTable
from app.engine.gpu.padded_lm_head import VOCAB_MULTIPLE
from app.engine.sampling.parameters import SamplingInput, is_counted, pack_request, token_mask
from app.engine.sampling.sampled_token import SampledToken
from app.engine.sampling.sampler import ADJUSTMENTS, FILTERS, Draw, apply_stages, row_parameters, sample, uniforms
from benchmarks.gpu.conformance.harness import triton_kernels
from benchmarks.gpu.conformance.sampling_cases import Case, chance, edges
from benchmarks.gpu.reference_kernels import ReferenceKernels
from benchmarks.gpu.results import Finding

Sample = Callable[[Tensor, Tensor, Tensor, SamplingTable, SampleOut], None]
_NEAR = 1e-6
"""Share of the total weight within which rounding may decide."""
_LOGPROB = 2e-5
"""Absolute and relative tolerance of a log-probability: the reference's own error is 7e-6."""


def draw(sampler: Sample, case: Case, device: str) -> tuple[list[SampledToken], SamplingTable, Tensor]:
    """Sampled tokens, and the table with the resident row of each. Samples two padding rows as well."""
    vocab, resident = case.logits_SV.shape[1], len(case.rows) + 3
    table = SamplingTable(resident, vocab, device)
    rows = Random(len(case.rows)).sample(range(resident - 1), len(case.rows))
    _load(table, case, rows)
    padding_rows = [resident - 1] * 2
    rows_S = torch.tensor(rows + padding_rows, dtype=torch.int32, device=device)
    positions_S = torch.tensor([row.position for row in case.rows] + [0, 0], dtype=torch.int32, device=device)
    padded_SV = _with_row_padding(torch.cat([case.logits_SV, case.logits_SV[:1].expand(2, -1)]).to(device))
    out = SampleOut.empty(len(rows_S), device)
    sampler(padded_SV, rows_S, positions_S, table, out)
    sampled_tokens = samples_of(out.numbers_X.cpu(), len(rows_S), [row.params.logprobs for row in case.rows])
    return sampled_tokens, table, rows_S[: len(rows)]


def wrong(
    sampler: Sample, case: Case, device: str, *, exact: bool = False, expected: Sequence[SampledToken] | None = None
) -> Iterator[str]:
    """A line for each row that differs from the reference.

    Args:
        exact: whether to report differences by rounding, too.
        expected: the reference's tokens, if already sampled.
    """
    logits_SV = case.logits_SV.to(device)
    expected = expected or sample(logits_SV, case.rows)
    sampled_tokens, table, rows_S = draw(sampler, case, device)
    for i, (row, reference, sampled) in enumerate(zip(case.rows, expected, sampled_tokens, strict=True)):
        if sampled.token != reference.token and (exact or not _is_near(logits_SV[i : i + 1], row, sampled, reference)):
            yield f"{case.name}, row {i}: {sampled.token} instead of {reference.token}: {row.params}"
        elif sampled.token == reference.token is not None and row.params.logprobs is not None:
            yield from (f"{case.name}, row {i}: {what}" for what in _wrong_scores(sampled, reference))
    yield from _wrong_counts(table.counts_RV[rows_S.long()].cpu(), case, sampled_tokens)


def _with_row_padding(logits_SV: Tensor) -> Tensor:
    """The same logits with the row stride of app/engine/gpu/padded_lm_head.py, and NaN between rows."""
    rows, vocab = logits_SV.shape
    return logits_SV.new_full((rows, -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE), torch.nan)[:, :vocab].copy_(
        logits_SV
    )


def _load(table: SamplingTable, case: Case, rows: list[int]) -> None:
    device, words = table.words_RW.device, array("i")
    tokens, owners, generated = array("i"), array("i"), array("b")
    for resident, row in zip(rows, case.rows, strict=True):
        request = _request(row)
        words += pack_request(request, table.vocab_size)
        if is_counted(row.params):
            tokens.extend(row.tokens)
            owners.extend([resident] * len(row.tokens))
            generated.extend([False] * row.n_prompt + [True] * len(row.generated))
    table.load(
        torch.tensor(rows, dtype=torch.int32, device=device),
        torch.tensor(words, dtype=torch.int32).view(len(rows), -1).to(device),
        torch.tensor(tokens, dtype=torch.int32, device=device),
        torch.tensor(owners, dtype=torch.int32, device=device),
        torch.tensor(generated, dtype=torch.bool, device=device),
    )
    masks = [token_mask(_request(row), len(row.generated), table.vocab_size, row.allowed) for row in case.rows]
    table.load_masks(
        torch.tensor(rows, dtype=torch.int32, device=device),
        torch.tensor([*map(list, masks)], dtype=torch.int32).to(device),
    )


def _request(row: SamplingInput) -> Request:
    return Request(
        id="",
        prompt=tuple(row.tokens[: row.n_prompt]),
        max_tokens=1,
        params=row.params,
        stop_ids=tuple(row.stop_ids),
        grammar="any" * (row.allowed is not None),
    )


def _is_near(logits_1V: Tensor, row: SamplingInput, sampled: SampledToken, reference: SampledToken) -> bool:
    """Whether the random number lies at the border between both tokens, by float64 weights."""
    if row.is_greedy or sampled.token is None or reference.token is None:
        return False
    parameters = row_parameters([row], logits_1V.shape[1], logits_1V.device)
    adjusted_1V = apply_stages(logits_1V.float(), parameters, ADJUSTMENTS).logits_SV
    weights_V = apply_stages(adjusted_1V.double(), parameters, FILTERS).weights_SV[0]
    until_V = weights_V.cumsum(0) / weights_V.sum()
    low, high = sorted((sampled.token, reference.token))
    (number,) = uniforms([Draw(row.params.seed, row.position, row.params.choice)])
    return all(abs(float(border) - number) < _NEAR for border in (until_V[low], until_V[high - 1]))


def _wrong_scores(sampled: SampledToken, reference: SampledToken) -> Iterator[str]:
    """Log-probabilities and most likely tokens, of which the lower id comes first where two are equally likely."""
    if [token for token, _ in sampled.top] != [token for token, _ in reference.top]:
        yield f"{sampled.top} are not the most likely tokens {reference.top}"
        return
    for (token, value), (_, expected) in zip(
        ((sampled.token, sampled.logprob), *sampled.top),
        ((reference.token, reference.logprob), *reference.top),
        strict=True,
    ):
        assert value is not None and expected is not None
        if value != expected and not abs(value - expected) <= _LOGPROB * max(1.0, abs(expected)):
            yield f"log-probability {value} of token {token} instead of {expected}"


def _wrong_counts(counts_SV: Tensor, case: Case, sampled_tokens: list[SampledToken]) -> Iterator[str]:
    vocab = counts_SV.shape[1]
    for i, (row, sampled) in enumerate(zip(case.rows, sampled_tokens, strict=True)):
        if is_counted(row.params):
            new = [] if sampled.token is None else [sampled.token]
            prompt_V = torch.bincount(torch.tensor(row.tokens[: row.n_prompt]), minlength=vocab) > 0
            generated_V = torch.bincount(torch.tensor([*row.generated, *new], dtype=torch.int64), minlength=vocab)
            if not torch.equal(counts_SV[i].long(), 2 * generated_V + prompt_V):
                yield f"{case.name}, row {i}: its tokens are counted incorrectly"


def check_samplers(device: str, tiny: bool) -> Iterator[Finding]:
    """Checks both samplers; Triton's only on a GPU or in its interpreter."""
    samplers: dict[str, Sample] = {"torch": ReferenceKernels().sample}
    if device != "cpu" or os.environ.get("TRITON_INTERPRET") == "1":
        samplers["triton"] = triton_kernels().sample
    for case in _cases(tiny):
        expected = sample(case.logits_SV.to(device), case.rows)
        for name, sampler in samplers.items():
            lines = list(wrong(sampler, case, device, expected=expected))
            what = f"{name}, {case.name}, {len(case.rows)} rows of {case.logits_SV.shape[1]:,}"
            yield Finding(what=what, ok=not lines, value=len(lines), unit="wrong", note="; ".join(lines)[:300])


def _cases(tiny: bool) -> Iterator[Case]:
    vocabs, rows = ((50,), 15) if tiny else ((50_257, 128_256, 152_064), 256)
    for vocab in vocabs:
        for dtype in (torch.float32, torch.bfloat16):
            yield chance(f"chance in {str(dtype).removeprefix('torch.')}", vocab, rows, vocab, dtype=dtype)
    yield from edges(300 if tiny else 128_256, 1)
