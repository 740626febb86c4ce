"""Changes of single logits before a draw: biases, repetition penalties, tokens that grammars forbid.

repetition_penalty r (CTRL: Keskar et al., 2019), for each token of prompt and output: logit / r where it is positive,
logit * r elsewhere. presence_penalty p and frequency_penalty f (OpenAI), for each token generated c > 0 times:
logit - f c - p. Computed in float64, and held within what float32 can tell: no penalty makes an infinity.

Shape legend: S rows, V vocabulary, N single tokens of all rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from app.engine.sampling.sampling_input import SamplingInput

_LARGEST = torch.finfo(torch.float32).max


def adjust(logits_SV: Tensor, rows: Items[SamplingInput]) -> None:
    """Biases, then penalties, in place."""
    _bias(logits_SV, rows)
    repeated = [(i, row) for i, row in enumerate(rows) if row.params.repetition_penalty != 1]
    _repetition(logits_SV, [(i, row) for i, row in repeated if row.tokens])
    counted = [(i, row) for i, row in enumerate(rows) if row.params.presence_penalty or row.params.frequency_penalty]
    _presence_and_frequency(logits_SV, [(i, row) for i, row in counted if len(row.tokens) > row.n_prompt])


def _bias(logits_SV: Tensor, rows: Items[SamplingInput]) -> None:
    vocab = logits_SV.shape[1]
    places, biases = array("q"), array("d")
    for i, row in enumerate(rows):
        for token, bias in row.params.logit_bias:
            if token < vocab:
                places.append(i * vocab + token)
                biases.append(bias)
    if places:
        place_N = torch.frombuffer(places, dtype=torch.int64).to(logits_SV.device)
        bias_N = torch.frombuffer(biases, dtype=torch.float64).to(logits_SV.device)
        flat = logits_SV.view(-1)
        flat.scatter_(0, place_N, _held(flat[place_N] + bias_N))


def _repetition(logits_SV: Tensor, rows: list[tuple[int, SamplingInput]]) -> None:
    """A token that stands several times in `place_N` gets the same result each time."""
    if not rows:
        return
    place_N, (r_N,) = _places(logits_SV, [(i, row.tokens, (row.params.repetition_penalty,)) for i, row in rows])
    flat = logits_SV.view(-1)
    logit_N = flat[place_N].double()
    flat.scatter_(0, place_N, _held((logit_N / r_N).where(logit_N > 0, logit_N * r_N)))


def _presence_and_frequency(logits_SV: Tensor, rows: list[tuple[int, SamplingInput]]) -> None:
    if not rows:
        return
    given = [(i, row.generated, (row.params.presence_penalty, row.params.frequency_penalty)) for i, row in rows]
    place_N, (presence_N, frequency_N) = _places(logits_SV, given)
    flat = logits_SV.view(-1)
    # Sums of ones are exact in any order.
    counts = torch.zeros_like(flat).scatter_add_(0, place_N, torch.ones_like(presence_N, dtype=flat.dtype))
    flat.scatter_(0, place_N, _held(flat[place_N] - (frequency_N * counts[place_N] + presence_N)))


def _places(
    logits_SV: Tensor, given: Items[tuple[int, Items[int], tuple[float, ...]]]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """For every (row, tokens, numbers): where each token's logit lies in the flat matrix, and each number beside it."""
    joined = array("q")
    for _, tokens, _ in given:
        joined.extend(tokens if isinstance(tokens, array) else array("q", tokens))
    device, vocab = logits_SV.device, logits_SV.shape[1]
    lengths_S = torch.tensor([len(tokens) for _, tokens, _ in given], device=device)
    row_N = torch.arange(len(given), device=device).repeat_interleave(lengths_S, output_size=len(joined))
    starts_S = torch.tensor([i * vocab for i, _, _ in given], device=device)
    numbers_XS = torch.tensor(list(zip(*(numbers for _, _, numbers in given), strict=True)), dtype=torch.float64)
    place_N = torch.frombuffer(joined, dtype=torch.int64).to(device) + starts_S[row_N]
    return place_N, tuple(each_S[row_N] for each_S in numbers_XS.to(device))


def _held(logit_N: Tensor) -> Tensor:
    """float32, without infinities."""
    return logit_N.clamp(-_LARGEST, _LARGEST).float()


# Shape legend: S rows, V vocabulary, W words of 32 bits, N single tokens of all rows.

NOTHING = float("-inf")


def forbid(logits_SV: Tensor, rows: Items[SamplingInput]) -> None:
    """Masks in place. Where nothing but the end is left to a row, it may end before min_tokens."""
    guided = [i for i, row in enumerate(rows) if row.allowed is not None]
    if guided:
        words_SW = torch.stack([mask for row in rows if (mask := row.allowed) is not None]).to(logits_SV.device)
        index_S = torch.tensor(guided, device=logits_SV.device)
        logits_SV[index_S] = logits_SV[index_S].where(_bits(words_SW, logits_SV.shape[1]), NOTHING)
    vocab = logits_SV.shape[1]
    banned = [
        (i, token)
        for i, row in enumerate(rows)
        if len(row.tokens) - row.n_prompt < row.params.min_tokens
        for token in row.stop_ids
        if token < vocab
    ]
    if banned:
        _ban(logits_SV, *torch.tensor(banned, device=logits_SV.device).unbind(1))


def _bits(words_SW: Tensor, vocab: int) -> Tensor:
    """[S, vocab] truth of each bit, the lowest of each word first."""
    places = torch.arange(32, dtype=torch.int32, device=words_SW.device)
    return (words_SW[:, :, None] >> places & 1).bool().flatten(1)[:, :vocab]


def _ban(logits_SV: Tensor, row_N: Tensor, token_N: Tensor) -> None:
    before_N = logits_SV[row_N, token_N]
    logits_SV[row_N, token_N] = NOTHING
    hopeless_S = logits_SV.amax(-1) == NOTHING
    logits_SV[row_N, token_N] = before_N.where(hopeless_S[row_N], NOTHING)
