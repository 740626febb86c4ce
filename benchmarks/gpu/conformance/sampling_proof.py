"""Checks a device sampler's result for a case against the oracle, app/engine/sampling/sampler.py.

A token may be another one than the oracle's where rounding decides: where the random number lies so near the border
between the two that sums of another order may come out on either side.

Shape legend: S rows, V vocabulary, N most likely tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from app.common.types import Request
from app.engine.gpu.kernels.sampling_state import SampleOut, SamplingTable
from app.engine.gpu.linears import WHOLE
from app.engine.gpu.step import packed, unpacked
from app.engine.sampling.logits_processors import adjust, forbid, weights
from app.engine.sampling.sampler import Draw, sample, uniforms
from app.engine.sampling.sampler_io import SampledToken, SamplingInput
from benchmarks.gpu.conformance.sampling_cases import Case

Sample = Callable[[Tensor, Tensor, Tensor, SamplingTable, SampleOut], None]
_NEAR = 1e-6
"""Of the whole weight: what rounding may decide."""
_LOGPROB = 2e-5
"""Absolute and relative tolerance of a log-probability: the oracle's own is off by 7e-6."""


def draw(subject: Sample, case: Case, device: str) -> tuple[list[SampledToken], SamplingTable, Tensor]:
    """The sampled tokens, and the table with the resident row of each. Two padding rows are sampled with them."""
    vocab, resident = case.logits_SV.shape[1], len(case.rows) + 3
    table = SamplingTable(resident, vocab, device)
    rows = Random(len(case.rows)).sample(range(resident - 1), len(case.rows))
    _load(table, case, rows)
    trash = [resident - 1] * 2
    rows_S = torch.tensor(rows + trash, dtype=torch.int32, device=device)
    positions_S = torch.tensor([row.position for row in case.rows] + [0, 0], dtype=torch.int32, device=device)
    padded_SV = _apart(torch.cat([case.logits_SV, case.logits_SV[:1].expand(2, -1)]).to(device))
    out = SampleOut.empty(len(rows_S), device)
    subject(padded_SV, rows_S, positions_S, table, out)
    drawn = unpacked(packed(out).cpu(), [row.params.logprobs for row in case.rows])
    return drawn, table, rows_S[: len(rows)]


def wrong(
    subject: Sample, case: Case, device: str, *, exact: bool = False, expected: Sequence[SampledToken] | None = None
) -> Iterator[str]:
    """A line for each row that differs from the oracle. exact: also by rounding. expected: the oracle's own draws."""
    logits_SV = case.logits_SV.to(device)
    expected = expected or sample(logits_SV, case.rows)
    drawn, table, rows_S = draw(subject, case, device)
    for i, (row, theirs, ours) in enumerate(zip(case.rows, expected, drawn, strict=True)):
        if ours.token != theirs.token and (exact or not _is_near(logits_SV[i : i + 1], row, ours, theirs)):
            yield f"{case.name}, row {i}: {ours.token} instead of {theirs.token}: {row.params}"
        elif ours.token is not None and row.params.logprobs is not None:
            yield from (f"{case.name}, row {i}: {what}" for what in _wrong_scores(logits_SV[i], row, ours))
    if table.counts_RV is not None:
        yield from _wrong_counts(table.counts_RV[rows_S.long()].cpu(), case, drawn)


def _apart(logits_SV: Tensor) -> Tensor:
    """The same, with rows as far apart as app/engine/gpu/linears.py leaves them, and no number between them."""
    rows, vocab = logits_SV.shape
    return logits_SV.new_full((rows, -(-vocab // WHOLE) * WHOLE), torch.nan)[:, :vocab].copy_(logits_SV)


def _load(table: SamplingTable, case: Case, rows: list[int]) -> None:
    device, words = table.words_RW.device, array("i")
    tokens, owners, generated = array("i"), array("i"), array("b")
    for resident, row in zip(rows, case.rows, strict=True):
        request = _request(row)
        assert table.fits(request)
        words += table.words(request)
        if table.is_counted(request):
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


def _request(row: SamplingInput) -> Request:
    return Request(
        id="", prompt=tuple(row.tokens[: row.n_prompt]), max_tokens=1, params=row.params, stop_ids=tuple(row.stop_ids)
    )


def _is_near(logits_1V: Tensor, row: SamplingInput, ours: SampledToken, theirs: SampledToken) -> bool:
    """Whether the number lies at the border between both tokens, by weights of float64."""
    if row.is_greedy or ours.token is None or theirs.token is None:
        return False
    logits_1V = logits_1V.float().clone()
    adjust(logits_1V, [row])
    forbid(logits_1V, [row])
    wide_1V = logits_1V.double()
    weights_V = weights(wide_1V, wide_1V.amax(-1, keepdim=True), [row.params])[0]
    until_V = weights_V.cumsum(0) / weights_V.sum()
    low, high = sorted((ours.token, theirs.token))
    (number,) = uniforms([Draw(row.params.seed, row.position, row.params.choice)])
    return all(abs(float(border) - number) < _NEAR for border in (until_V[low], until_V[high - 1]))


def _wrong_scores(logits_V: Tensor, row: SamplingInput, ours: SampledToken) -> Iterator[str]:
    assert ours.token is not None and ours.logprob is not None
    exact_V = logits_V.double().log_softmax(-1).clamp(min=torch.finfo(torch.float32).min)
    count = min(row.params.logprobs or 0, len(exact_V))
    if len(ours.top) != count:
        yield f"{len(ours.top)} most likely tokens instead of {count}"
    if list(ours.top) != sorted(ours.top, key=lambda pair: (-pair[1], pair[0])):
        yield f"not in order: {ours.top}"
    if dict(ours.top).get(ours.token, ours.logprob) != ours.logprob:
        yield "the chosen token has two log-probabilities"
    for token, value in ((ours.token, ours.logprob), *ours.top):
        if abs(value - float(exact_V[token])) > _LOGPROB * max(1.0, abs(value)):
            yield f"log-probability {value} of token {token} instead of {float(exact_V[token])}"
    if ours.top:
        yield from _left_out(exact_V, [token for token, _ in ours.top])


def _left_out(exact_V: Tensor, told: list[int]) -> Iterator[str]:
    """No other token may be more likely than the last one; among equals the lower ids are reported."""
    if len(set(told)) != len(told):
        yield f"told twice: {told}"
    least = float(exact_V[told[-1]])
    others_V = exact_V.scatter(0, torch.tensor(told, device=exact_V.device), float("-inf"))
    if float(others_V.amax()) > least + 2 * _LOGPROB * max(1.0, abs(least)):
        yield f"token {int(others_V.argmax())} is left out"
    for a, b in pairwise(told):
        if exact_V[a] == exact_V[b] and a > b:
            yield f"{a} before {b}, which is as likely"
    if bool((others_V[: told[-1]] == exact_V[told[-1]]).any()):
        yield f"one before {told[-1]}, which is as likely, is left out"


def _wrong_counts(counts_SV: Tensor, case: Case, drawn: list[SampledToken]) -> Iterator[str]:
    vocab = counts_SV.shape[1]
    for i, (row, ours) in enumerate(zip(case.rows, drawn, strict=True)):
        p = row.params
        if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty:
            new = [] if ours.token is None else [ours.token]
            prompt_V = torch.bincount(torch.tensor(row.tokens[: row.n_prompt]), minlength=vocab) > 0
            generated_V = torch.bincount(torch.tensor([*row.generated, *new], dtype=torch.int64), minlength=vocab)
            if not torch.equal(counts_SV[i].long(), 2 * generated_V + prompt_V):
                yield f"{case.name}, row {i}: its tokens are counted wrong"
