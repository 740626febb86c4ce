"""The stages of sampling, in their order: logits of each row in, weights of its tokens out; and the choice of a token.

repetition_penalty r (CTRL: Keskar et al., 2019), for each token of prompt and output: logit / r where it is positive,
logit * r elsewhere. presence_penalty p and frequency_penalty f (OpenAI), for each token generated c > 0 times:
logit - f c - p. Computed in float64 and clamped to the range of float32, so that no penalty results in an infinity.

Every filter is a threshold that keeps all tokens at or above it, so that tokens of equal logits stay together and the
result never depends on the order of a sort. Sums are float64. A row's weights depend on that row alone.

Nothing waits for the device unless RowParameters.may_wait allows it: then a filter tries the top tokens before it sorts
whole rows, with the same result.

Shape legend: S rows, V vocabulary, B blocks of it, N entries of a row, X columns of any kind.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.sampling import parameters as layout
from app.engine.sampling.parameters import RowParameters, is_counted
from app.engine.sampling.sampler_io import SamplingInput

NEG_INF = float("-inf")
_MAX_FLOAT32 = torch.finfo(torch.float32).max
_TOP_TRIED = 256
"""Number of highest keys that are tried before a row is sorted completely."""
_SUM_BLOCK = 128


@dataclass(slots=True)
class StageValues:
    """What the stages change."""

    logits_SV: Tensor
    scaled_SV: Tensor
    """Logits below the best one, divided by the temperature; from the stage `temperature` on."""
    weights_SV: Tensor
    """1 for the best token, 0 for filtered tokens; from the stage `temperature` on."""


class Stage(NamedTuple):
    """A step of the specification (docs/sampling.md)."""

    name: str
    is_requested: Callable[[SamplingInput], bool]
    apply: Callable[[StageValues, RowParameters], None]


def apply_stages(logits_SV: Tensor, rows: RowParameters, stages: Items[Stage]) -> StageValues:
    """Applies those of `stages` that rows.stages names; the caller's logits stay as they are."""
    values = StageValues(logits_SV, logits_SV, logits_SV)
    for stage in stages:
        if stage.name in rows.stages:
            stage.apply(values, rows)
    return values


def _add_biases(values: StageValues, rows: RowParameters) -> None:
    vocab = values.logits_SV.shape[1]
    logits_SX = F.pad(values.logits_SV, (0, 1))  # one more column, for unused entries
    ids_SN = rows.bias_ids_SN.where(rows.bias_ids_SN >= 0, vocab)
    logits_SX.scatter_(1, ids_SN, _clamped(logits_SX.gather(1, ids_SN) + rows.biases_SN))
    values.logits_SV = logits_SX[:, :vocab]


def _penalize(values: StageValues, rows: RowParameters) -> None:
    if rows.counts_SV is None:
        return
    logits_SX, counts_SX, ids_SN = values.logits_SV, rows.counts_SV, rows.counted_ids_SN
    if ids_SN is not None:
        logits_SX, counts_SX = logits_SX.gather(1, ids_SN), counts_SX.gather(1, ids_SN)
    r_S1 = rows.number(layout.REPETITION)
    repeated_SX = _clamped((logits_SX / r_S1).where(logits_SX > 0, logits_SX * r_S1)).where(counts_SX > 0, logits_SX)
    generated_SX = counts_SX >> 1
    # One subtraction: penalties that cancel out must not take a tiny logit's digits with them.
    penalty_SX = rows.number(layout.FREQUENCY) * generated_SX + rows.number(layout.PRESENCE)
    logits_SX = _clamped(repeated_SX - penalty_SX).where(generated_SX > 0, repeated_SX)
    values.logits_SV = logits_SX if ids_SN is None else values.logits_SV.scatter(1, ids_SN, logits_SX)


def _mask(values: StageValues, rows: RowParameters) -> None:
    """Applied after biases and penalties with the same result, since none of them raises -inf."""
    if rows.allowed_SX is not None:
        shifts = torch.arange(32, dtype=torch.int32, device=rows.allowed_SX.device)  # the lowest bit of a word first
        is_allowed_SX = (rows.allowed_SX[:, :, None] >> shifts & 1).bool().flatten(1)
        values.logits_SV = values.logits_SV.where(is_allowed_SX[:, : values.logits_SV.shape[1]], NEG_INF)


def _ban_stop_tokens(values: StageValues, rows: RowParameters) -> None:
    """Before min_tokens; a row that may only end is allowed to end."""
    is_early_S1 = rows.positions_S1 - rows.word(layout.N_PROMPT) < rows.word(layout.MIN_TOKENS)
    ceilings_SN = torch.where((rows.stop_ids_SN >= 0) & is_early_S1, NEG_INF, -NEG_INF)
    banned_SV = values.logits_SV.scatter_reduce(1, rows.stop_ids_SN.clamp(min=0), ceilings_SN, "amin")
    values.logits_SV = values.logits_SV.where(banned_SV.amax(-1, keepdim=True) == NEG_INF, banned_SV)


def _weigh(values: StageValues, rows: RowParameters) -> None:
    best_S1 = values.logits_SV.amax(-1, keepdim=True).clamp(min=-_MAX_FLOAT32)
    # Subtract the maximum first: a tiny temperature must not turn finite logits into infinities.
    values.scaled_SV = (values.logits_SV - best_S1) / rows.number(layout.TEMPERATURE).to(best_S1.dtype)
    values.weights_SV = values.scaled_SV.exp()


def _keep_top_k(values: StageValues, rows: RowParameters) -> None:
    vocab = values.logits_SV.shape[1]
    k_S1 = rows.word(layout.TOP_K)
    k_S1 = k_S1.where((k_S1 > 0) & (k_S1 < vocab), vocab)
    most = int(k_S1.where(k_S1 < vocab, 1).amax()) if rows.may_wait else vocab
    best_SX = values.logits_SV.topk(most, dim=-1).values
    least_S1 = best_SX.gather(1, k_S1.clamp(max=most) - 1).where(k_S1 < vocab, NEG_INF)
    # Weights, not logits: exp() of -inf takes ten times as long as that of other numbers.
    values.weights_SV = values.weights_SV.where(values.logits_SV >= least_S1, 0.0)


def _keep_typical(values: StageValues, rows: RowParameters) -> None:
    """Keeps the fewest tokens that together reach typical_p, in order of the distance of surprise from entropy."""
    weights_SV, share_S1 = values.weights_SV, rows.number(layout.TYPICAL_P)
    total_S1 = _total(weights_SV)
    surprise_SV = total_S1.log() - values.scaled_SV
    entropy_S1 = _total((surprise_SV * weights_SV).where(weights_SV > 0, 0.0)) / total_S1
    nearness_SV = (-(surprise_SV - entropy_S1).abs()).where(weights_SV > 0, NEG_INF)
    least_S1 = _threshold(nearness_SV, weights_SV, share_S1, may_wait=rows.may_wait)
    values.weights_SV = weights_SV.where((nearness_SV >= least_S1) | (share_S1 >= 1), 0.0)


def _keep_top_p(values: StageValues, rows: RowParameters) -> None:
    weights_SV, share_S1 = values.weights_SV, rows.number(layout.TOP_P)
    least_S1 = _threshold(weights_SV, weights_SV, share_S1, may_wait=rows.may_wait)
    values.weights_SV = weights_SV.where((weights_SV >= least_S1) | (share_S1 >= 1), 0.0)


def _keep_min_p(values: StageValues, rows: RowParameters) -> None:
    least_S1 = rows.number(layout.MIN_P).to(values.weights_SV.dtype) * values.weights_SV.amax(-1, keepdim=True)
    values.weights_SV = values.weights_SV.where(values.weights_SV >= least_S1, 0.0)


ADJUSTMENTS = (
    Stage("logit_bias", lambda row: bool(row.params.logit_bias), _add_biases),
    Stage("penalties", lambda row: is_counted(row.params), _penalize),
    Stage("grammar", lambda row: row.allowed is not None, _mask),
    Stage("min_tokens", lambda row: row.params.min_tokens > 0, _ban_stop_tokens),
)
"""Stages before a greedy row takes its best token."""
FILTERS = (
    Stage("temperature", lambda _row: True, _weigh),
    Stage("top_k", lambda row: row.params.top_k > 0, _keep_top_k),
    Stage("typical_p", lambda row: row.params.typical_p < 1, _keep_typical),
    Stage("top_p", lambda row: row.params.top_p < 1, _keep_top_p),
    Stage("min_p", lambda row: row.params.min_p > 0, _keep_min_p),
)
"""Stages of all other rows."""
GREEDY = "greedy"
"""Name of the choice of the best token; the filters' rows draw instead."""
STAGE_NAMES = frozenset({GREEDY, *(stage.name for stage in ADJUSTMENTS + FILTERS)})


def requested_stages(rows: Items[SamplingInput]) -> frozenset[str]:
    """Names of the stages that any of the rows requests; filters only if not all rows are greedy."""
    drawing = [row for row in rows if not row.is_greedy]
    stages = [stage for stage in ADJUSTMENTS if any(map(stage.is_requested, rows))]
    stages += [stage for stage in FILTERS if any(map(stage.is_requested, drawing))]
    return frozenset([GREEDY] * (len(drawing) < len(rows)) + [stage.name for stage in stages])


def _clamped(logit_SX: Tensor) -> Tensor:
    """Converts to float32 without infinities."""
    return logit_SX.clamp(-_MAX_FLOAT32, _MAX_FLOAT32).float()


def _block_sums(weights_SX: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of weights [S, B, 128], and the cumulative sums of the blocks [S, B], which end with the row's sum."""
    if spare := -weights_SX.shape[1] % _SUM_BLOCK:
        weights_SX = F.pad(weights_SX, (0, spare))
    blocks_SBX = weights_SX.reshape(len(weights_SX), -1, _SUM_BLOCK)
    # In blocks, because torch may sum a whole row in another order when the row is alone.
    return blocks_SBX, blocks_SBX.sum(-1, dtype=torch.float64).cumsum(-1)


def _total(weights_SX: Tensor) -> Tensor:
    return _block_sums(weights_SX)[1][:, -1:]


def _threshold(key_SX: Tensor, weights_SX: Tensor, share_S1: Tensor, *, may_wait: bool) -> Tensor:
    """[S, 1] key of the last token, in descending order of keys, needed to reach share_S1 of the total weight."""
    target_S1, width = _total(weights_SX) * share_S1, key_SX.shape[1]
    tried = min(_TOP_TRIED, width) if may_wait else width
    least_S1, reached_S1 = _threshold_in_top(key_SX, weights_SX, target_S1, tried)
    if tried < width:
        # Few rows are so flat that the top tokens do not suffice: only those are sorted.
        wide = (~reached_S1 & (share_S1 < 1)).squeeze(1).nonzero().squeeze(1)
        if len(wide):
            least_S1[wide], _ = _threshold_in_top(key_SX[wide], weights_SX[wide], target_S1[wide], width)
    return least_S1


def _threshold_in_top(key_SX: Tensor, weights_SX: Tensor, target_S1: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Key of the last token that is needed, and whether the `count` highest keys suffice."""
    order = key_SX.topk(count, dim=-1) if count < key_SX.shape[1] else key_SX.sort(dim=-1, descending=True)
    sums_SX = weights_SX.gather(1, order.indices).cumsum(-1, dtype=torch.float64)
    needed_S1 = (sums_SX < target_S1).sum(-1, keepdim=True)
    return order.values.gather(1, needed_S1.clamp(max=count - 1)), needed_S1 < count


def inverse_cdf(weights_SX: Tensor, numbers_S1: Tensor) -> Tensor:
    """[S, 1] first column at which the cumulative weight exceeds the row's number times its total weight.

    In the order of the vocabulary.
    """
    blocks_SBX, sums_SB = _block_sums(weights_SX)
    target_S1 = numbers_S1 * sums_SB[:, -1:]
    if sums_SB.shape[1] == 1:
        return _first_above(blocks_SBX.squeeze(1).cumsum(-1, dtype=torch.float64), target_S1)
    block_S1 = _first_above(sums_SB, target_S1)
    within_SX = blocks_SBX.gather(1, block_S1[:, :, None].expand(-1, -1, blocks_SBX.shape[2])).squeeze(1)
    before_S1 = sums_SB.gather(1, (block_S1 - 1).clamp(min=0)).where(block_S1 > 0, 0.0)
    index_S1 = _first_above(within_SX.cumsum(-1, dtype=torch.float64), target_S1 - before_S1)
    return block_S1 * blocks_SBX.shape[2] + index_S1


def _first_above(sums_SX: Tensor, target_S1: Tensor) -> Tensor:
    """[S, 1] first index whose sum exceeds the target; if rounding lets none exceed it, the last nonzero weight."""
    last_S1 = torch.searchsorted(sums_SX, sums_SX[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(sums_SX, target_S1, right=True), last_S1)


_LIST_BLOCK = 32


def most_likely(values_SV: Tensor, count: int) -> Tensor:
    """[S, N] ids of the `count` highest values, all above -inf: the highest first, the lower id first among equals."""
    count = min(count, values_SV.shape[1])
    padded_SV = F.pad(values_SV, (0, -values_SV.shape[1] % _LIST_BLOCK), value=NEG_INF)
    blocks_SBX = padded_SV.unflatten(1, (-1, _LIST_BLOCK))
    # Tokens in blocks that come after `count` others, by their best token, come after `count` tokens.
    blocks_SB = torch.arange(blocks_SBX.shape[1], device=values_SV.device).expand(len(values_SV), -1)
    block_SN = _in_order(blocks_SBX.amax(-1), blocks_SB, count)
    ids_SX = (block_SN[:, :, None] * _LIST_BLOCK + torch.arange(_LIST_BLOCK, device=values_SV.device)).flatten(1)
    return _in_order(padded_SV.gather(1, ids_SX), ids_SX, count)


def _in_order(values_SX: Tensor, ids_SX: Tensor, count: int) -> Tensor:
    """[S, N] ids of up to `count` highest values: the highest first, the lower id first among equals."""
    bits_SX = (values_SX + 0.0).view(torch.int32)  # both zeros are equal
    # The upper bits are integers in the order of the floats, the lower bits the id from the end: all keys differ.
    order_SX = (bits_SX ^ (bits_SX >> 31 & 0x7FFFFFFF)).long() << 32 | 0xFFFFFFFF - ids_SX
    return 0xFFFFFFFF - (order_SX.topk(min(count, order_SX.shape[1]), dim=-1).values & 0xFFFFFFFF)
