"""Logits processors: biases, penalties and grammar masks, then temperature and filters, and the choice of a token.

repetition_penalty r (CTRL: Keskar et al., 2019), for each token of prompt and output: logit / r where it is positive,
logit * r elsewhere. presence_penalty p and frequency_penalty f (OpenAI), for each token generated c > 0 times:
logit - f c - p. Computed in float64 and clamped to the range of float32, so that no penalty results in an infinity.

Order of the filters: temperature -> top_k -> typical_p -> top_p -> min_p, then inverse-CDF sampling.

Every filter is a threshold that keeps all tokens at or above it, so that tokens of equal logits stay together and the
result never depends on the order of a sort. Sums are float64. A row's weights depend on that row alone.

Shape legend: S rows, V vocabulary, N single tokens of all rows, X tokens: the vocabulary, or the few candidates of each
row (-inf in unused columns).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from app.common.types import SamplingParams
from app.engine.sampling.sampler_io import SamplingInput

_MAX_FLOAT32 = torch.finfo(torch.float32).max


def apply_penalties(logits_SV: Tensor, rows: Items[SamplingInput]) -> None:
    """Applies biases, then penalties, in place."""
    _bias(logits_SV, rows)
    repeated = [(i, row) for i, row in enumerate(rows) if row.params.repetition_penalty != 1]
    _repetition(logits_SV, [(i, row) for i, row in repeated if row.tokens])
    counted = [(i, row) for i, row in enumerate(rows) if row.params.presence_penalty or row.params.frequency_penalty]
    _presence_and_frequency(logits_SV, [(i, row) for i, row in counted if len(row.tokens) > row.n_prompt])


def _bias(logits_SV: Tensor, rows: Items[SamplingInput]) -> None:
    vocab = logits_SV.shape[1]
    indices, biases = array("q"), array("d")
    for i, row in enumerate(rows):
        for token, bias in row.params.logit_bias:
            if token < vocab:
                indices.append(i * vocab + token)
                biases.append(bias)
    if indices:
        index_N = torch.frombuffer(indices, dtype=torch.int64).to(logits_SV.device)
        bias_N = torch.frombuffer(biases, dtype=torch.float64).to(logits_SV.device)
        flat = logits_SV.view(-1)
        flat.scatter_(0, index_N, _clamped(flat[index_N] + bias_N))


def _repetition(logits_SV: Tensor, rows: list[tuple[int, SamplingInput]]) -> None:
    """A token that occurs several times in `index_N` gets the same result each time."""
    if not rows:
        return
    index_N, (r_N,) = _flat_indices(logits_SV, [(i, row.tokens, (row.params.repetition_penalty,)) for i, row in rows])
    flat = logits_SV.view(-1)
    logit_N = flat[index_N].double()
    flat.scatter_(0, index_N, _clamped((logit_N / r_N).where(logit_N > 0, logit_N * r_N)))


def _presence_and_frequency(logits_SV: Tensor, rows: list[tuple[int, SamplingInput]]) -> None:
    if not rows:
        return
    given = [(i, row.generated, (row.params.presence_penalty, row.params.frequency_penalty)) for i, row in rows]
    index_N, (presence_N, frequency_N) = _flat_indices(logits_SV, given)
    flat = logits_SV.view(-1)
    # Sums of ones are exact in any order.
    counts = torch.zeros_like(flat).scatter_add_(0, index_N, torch.ones_like(presence_N, dtype=flat.dtype))
    flat.scatter_(0, index_N, _clamped(flat[index_N] - (frequency_N * counts[index_N] + presence_N)))


def _flat_indices(
    logits_SV: Tensor, given: Items[tuple[int, Items[int], tuple[float, ...]]]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """For every (row, tokens, numbers): index of each token's logit in the flat matrix, and the numbers per token."""
    joined = array("q")
    for _, tokens, _ in given:
        joined.extend(tokens if isinstance(tokens, array) else array("q", tokens))
    device, vocab = logits_SV.device, logits_SV.shape[1]
    lengths_S = torch.tensor([len(tokens) for _, tokens, _ in given], device=device)
    row_N = torch.arange(len(given), device=device).repeat_interleave(lengths_S, output_size=len(joined))
    starts_S = torch.tensor([i * vocab for i, _, _ in given], device=device)
    numbers_XS = torch.tensor(list(zip(*(numbers for _, _, numbers in given), strict=True)), dtype=torch.float64)
    index_N = torch.frombuffer(joined, dtype=torch.int64).to(device) + starts_S[row_N]
    return index_N, tuple(each_S[row_N] for each_S in numbers_XS.to(device))


def _clamped(logit_N: Tensor) -> Tensor:
    """Converts to float32 without infinities."""
    return logit_N.clamp(-_MAX_FLOAT32, _MAX_FLOAT32).float()


# Shape legend: S rows, V vocabulary, W words of 32 bits, N single tokens of all rows.

NEG_INF = float("-inf")


def apply_masks(logits_SV: Tensor, rows: Items[SamplingInput]) -> None:
    """Applies masks in place. A row that may only end is allowed to end before min_tokens."""
    guided = [i for i, row in enumerate(rows) if row.allowed is not None]
    if guided:
        words_SW = torch.stack([mask for row in rows if (mask := row.allowed) is not None]).to(logits_SV.device)
        index_S = torch.tensor(guided, device=logits_SV.device)
        logits_SV[index_S] = logits_SV[index_S].where(_bits(words_SW, logits_SV.shape[1]), NEG_INF)
    vocab = logits_SV.shape[1]
    stops = [
        (i, token)
        for i, row in enumerate(rows)
        if len(row.tokens) - row.n_prompt < row.params.min_tokens
        for token in row.stop_ids
        if token < vocab
    ]
    if stops:
        _mask_stop_tokens(logits_SV, *torch.tensor(stops, device=logits_SV.device).unbind(1))


def _bits(words_SW: Tensor, vocab: int) -> Tensor:
    """[S, vocab] value of each bit, the lowest bit of each word first."""
    shifts = torch.arange(32, dtype=torch.int32, device=words_SW.device)
    return (words_SW[:, :, None] >> shifts & 1).bool().flatten(1)[:, :vocab]


def _mask_stop_tokens(logits_SV: Tensor, row_N: Tensor, token_N: Tensor) -> None:
    before_N = logits_SV[row_N, token_N]
    logits_SV[row_N, token_N] = NEG_INF
    all_masked_S = logits_SV.amax(-1) == NEG_INF
    logits_SV[row_N, token_N] = before_N.where(all_masked_S[row_N], NEG_INF)


# Split the vocabulary into groups. The k-th largest of the group maxima is at most the k-th largest value, because each
# maximum is a value. So all k best tokens, and all that tie with the last of them, reach this threshold; and they are
# in the few blocks of neighboring tokens whose maximum reaches it.
#
# Shape legend: S rows, V vocabulary, B blocks, G groups, N tokens of all rows, X = WIDTH columns.

WIDTH = 128
"""Capacity for the candidates of a row."""
MOST_CANDIDATES = 64
"""The largest k for which this capacity is probably enough."""
_BLOCK = 32
_MIN_FLOAT32 = torch.finfo(torch.float32).min


class Candidates(NamedTuple):
    """At least the k best tokens of each row, including all ties; unused columns hold -inf."""

    values_SX: Tensor
    ids_SX: Tensor
    fits: list[bool]
    """For each row whether its candidates fit; if not, the row must be ignored."""


def candidates(values_SV: Tensor, k: Items[int]) -> Candidates:
    """Finds the candidates for the k of each row. Tokens with value -inf are never candidates."""
    rows, vocab = values_SV.shape
    device = values_SV.device
    if spare := -vocab % _BLOCK:
        values_SV = F.pad(values_SV, (0, spare), value=NEG_INF)
    blocks_BX = values_SV.reshape(-1, _BLOCK)
    best_SB = blocks_BX.amax(-1).view(rows, -1)
    # Group tokens that are far apart: neighbors are similar (frequent tokens have low ids), and grouping them would
    # lower the threshold.
    least_S1 = _candidate_threshold(values_SV.reshape(rows, _BLOCK, -1).amax(1), k)
    block_B = (best_SB >= least_S1).view(-1).nonzero().squeeze(1)
    row_B = block_B // best_SB.shape[1]
    selected_BX = blocks_BX.index_select(0, block_B)
    index_N = (selected_BX >= least_S1[row_B]).view(-1).nonzero().squeeze(1)
    at_N = index_N // _BLOCK
    row_N, value_N = row_B[at_N], selected_BX.view(-1)[index_N]
    id_N = (block_B * _BLOCK)[at_N] + index_N % _BLOCK - row_N * values_SV.shape[1]
    count_S = row_N.bincount(minlength=rows)
    # A row's tokens are adjacent: a token's column is its distance from the first token of the row.
    column_N = torch.arange(len(row_N), device=device) - (count_S.cumsum(0) - count_S)[row_N]
    fits = [count <= WIDTH for count in count_S.tolist()]
    if not all(fits):
        row_N, id_N, value_N, column_N = (each[column_N < WIDTH] for each in (row_N, id_N, value_N, column_N))
    column_N += row_N * WIDTH
    values_SX = torch.full((rows * WIDTH,), NEG_INF, device=device).scatter_(0, column_N, value_N)
    ids_SX = torch.zeros(rows * WIDTH, dtype=torch.int64, device=device).scatter_(0, column_N, id_N)
    return Candidates(values_SX.view(rows, WIDTH), ids_SX.view(rows, WIDTH), fits)


def _candidate_threshold(best_SG: Tensor, k: Items[int]) -> Tensor:
    """[S, 1] least value of a candidate: the k-th largest group maximum, or the least finite value if k > G."""
    n_groups = best_SG.shape[1]
    limits = torch.tensor(k, device=best_SG.device)[:, None]
    best_SX = best_SG.topk(min(max(k), n_groups), dim=-1).values
    if max(k) <= n_groups:
        return best_SX.gather(1, limits - 1).clamp(min=_MIN_FLOAT32)
    least_S1 = best_SX.gather(1, limits.clamp(max=n_groups) - 1)
    return least_S1.masked_fill(limits > n_groups, NEG_INF).clamp(min=_MIN_FLOAT32)


MIN_TEMPERATURE = 1e-30
"""Lower temperatures count as this one, which float32 still distinguishes from 0."""
_TOP_TRIED = 256
"""Number of highest keys that are tried before a row is sorted completely."""
_SUM_BLOCK = 128
_MIN_FLOAT64 = 5e-324


def token_weights(logits_SX: Tensor, best_S1: Tensor, params: Items[SamplingParams]) -> Tensor:
    """[S, X] weights: 1 for the best logit, 0 for filtered tokens. best_S1: the best logit of each row, finite."""
    shares = [(max(p.temperature, MIN_TEMPERATURE), p.typical_p, p.top_p, p.min_p) for p in params]
    shares_S4 = torch.tensor(shares, dtype=torch.float64, device=logits_SX.device)
    temperature_S1, typical_p_S1, top_p_S1, min_p_S1 = (shares_S4[:, i : i + 1] for i in range(4))
    ranked = None
    if logits_SX.shape[1] <= _TOP_TRIED and any(p.top_k or p.top_p < 1 for p in params):
        ranked = logits_SX.sort(dim=-1, descending=True)
    if any(p.top_k for p in params):
        logits_SX = _keep_top_k(logits_SX, [p.top_k for p in params], ranked and ranked.values)
    # Subtract the maximum first: a tiny temperature must not turn finite logits into infinities.
    scaled_SX = (logits_SX - best_S1) / temperature_S1.to(logits_SX.dtype)
    weights_SX: Tensor = scaled_SX.exp()
    if any(p.typical_p < 1 for p in params):
        weights_SX = _keep_typical(weights_SX, scaled_SX, typical_p_S1)
    if any(p.top_p < 1 for p in params):
        if ranked:  # tokens that typical_p removed have weight 0: they add nothing, and are never the last one needed
            target_S1 = (block_sums(weights_SX)[1][:, -1:] * top_p_S1).clamp(min=_MIN_FLOAT64)
            least_S1, _ = threshold_in_sorted(weights_SX.gather(1, ranked.indices), target_S1)
        else:
            least_S1 = _threshold(weights_SX, weights_SX, top_p_S1)
        weights_SX = weights_SX.where((weights_SX >= least_S1) | (top_p_S1 >= 1), 0.0)
    if any(p.min_p for p in params):
        least_S1 = min_p_S1.to(weights_SX.dtype) * weights_SX.amax(-1, keepdim=True)
        weights_SX = weights_SX.where(weights_SX >= least_S1, 0.0)
    return weights_SX


def block_sums(weights_SX: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of weights [S, B, 128], and the cumulative sums of the blocks [S, B], which end with the row's sum."""
    if spare := -weights_SX.shape[1] % _SUM_BLOCK:
        weights_SX = F.pad(weights_SX, (0, spare))
    blocks_SBX = weights_SX.reshape(len(weights_SX), -1, _SUM_BLOCK)
    # In blocks, because torch may sum a whole row in another order when the row is alone.
    return blocks_SBX, blocks_SBX.sum(-1, dtype=torch.float64).cumsum(-1)


def threshold_in_sorted(key_SX: Tensor, target_S1: Tensor, weights_SX: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[S, 1] key of the last token that is needed to reach target_S1, and whether the weights reach it at all.

    key_SX: in descending order, with the weights in the same order; without weights_SX, the keys are the weights.
    """
    sums_SX = (key_SX if weights_SX is None else weights_SX).cumsum(-1, dtype=torch.float64)
    needed_S1 = (sums_SX < target_S1).sum(-1, keepdim=True)
    n_keys = key_SX.shape[1]
    return key_SX.gather(1, needed_S1.clamp(max=n_keys - 1)), needed_S1 < n_keys


def _keep_top_k(logits_SX: Tensor, top_k: list[int], best_SX: Tensor | None) -> Tensor:
    """-inf for every token below the k-th best; rows with top_k 0 stay as they are.

    best_SX: the logits in descending order, if they are already sorted.
    """
    width = logits_SX.shape[1]
    limits = [k if 0 < k < width else width for k in top_k]
    if best_SX is None:
        best_SX = logits_SX.topk(max((k for k in limits if k < width), default=1), dim=-1).values
    index_S1 = torch.tensor([min(k, best_SX.shape[1]) - 1 for k in limits], device=logits_SX.device)[:, None]
    off_S1 = torch.tensor([k == width for k in limits], device=logits_SX.device)[:, None]
    return logits_SX.where((logits_SX >= best_SX.gather(1, index_S1)) | off_S1, NEG_INF)


def _keep_typical(weights_SX: Tensor, scaled_SX: Tensor, typical_p_S1: Tensor) -> Tensor:
    """Keeps the fewest tokens that together reach typical_p, in order of the distance of surprise from entropy."""
    total_S1 = block_sums(weights_SX)[1][:, -1:]
    surprise_SX = total_S1.log() - scaled_SX
    parts_SX = (surprise_SX * weights_SX).where(weights_SX > 0, 0.0)
    entropy_S1 = block_sums(parts_SX)[1][:, -1:] / total_S1
    nearness_SX = (-(surprise_SX - entropy_S1).abs()).where(weights_SX > 0, NEG_INF)
    least_S1 = _threshold(nearness_SX, weights_SX, typical_p_S1)
    return weights_SX.where((nearness_SX >= least_S1) | (typical_p_S1 >= 1), 0.0)


def _threshold(key_SX: Tensor, weights_SX: Tensor, share_S1: Tensor) -> Tensor:
    """[S, 1] key of the last token, in descending order of keys, needed to reach share_S1 of the total weight."""
    target_S1 = block_sums(weights_SX)[1][:, -1:] * share_S1
    least_S1, reached_S1 = _threshold_in_top(key_SX, weights_SX, target_S1, min(_TOP_TRIED, key_SX.shape[1]))
    if key_SX.shape[1] <= _TOP_TRIED:
        return least_S1
    # Few rows are so flat that the top tokens do not suffice: only those are sorted.
    wide = (~reached_S1 & (share_S1 < 1)).squeeze(1).nonzero().squeeze(1)
    if len(wide):
        least_S1[wide], _ = _threshold_in_top(key_SX[wide], weights_SX[wide], target_S1[wide], key_SX.shape[1])
    return least_S1


def _threshold_in_top(key_SX: Tensor, weights_SX: Tensor, target_S1: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Key of the last token that is needed, and whether the `count` highest keys suffice."""
    order = key_SX.topk(count, dim=-1) if count < key_SX.shape[1] else key_SX.sort(dim=-1, descending=True)
    return threshold_in_sorted(order.values, target_S1, weights_SX.gather(1, order.indices))


# Inverse-CDF sampling in the order of the vocabulary. It reads no value back to the host, so it also runs where waiting
# for the device is not allowed.
#
# Shape legend: S rows, X tokens to choose from, B blocks of them.


def inverse_cdf(weights_SX: Tensor, numbers_S1: Tensor) -> Tensor:
    """[S] first column at which the cumulative weight exceeds the row's number times its total weight."""
    blocks_SBX, sums_SB = block_sums(weights_SX)
    target_S1 = numbers_S1 * sums_SB[:, -1:]
    if sums_SB.shape[1] == 1:
        return _first_above(blocks_SBX.squeeze(1).cumsum(-1, dtype=torch.float64), target_S1).squeeze(1)
    block_S1 = _first_above(sums_SB, target_S1)
    within_SX = blocks_SBX.gather(1, block_S1[:, :, None].expand(-1, -1, blocks_SBX.shape[2])).squeeze(1)
    before_S1 = sums_SB.gather(1, (block_S1 - 1).clamp(min=0)).where(block_S1 > 0, 0.0)
    index_S1 = _first_above(within_SX.cumsum(-1, dtype=torch.float64), target_S1 - before_S1)
    return (block_S1 * blocks_SBX.shape[2] + index_S1).squeeze(1)


def _first_above(sums_SX: Tensor, target_S1: Tensor) -> Tensor:
    """[S, 1] first index whose sum exceeds the target; if rounding lets none exceed it, the last nonzero weight."""
    last_S1 = torch.searchsorted(sums_SX, sums_SX[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(sums_SX, target_S1, right=True), last_S1)
