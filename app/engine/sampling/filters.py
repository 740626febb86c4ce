"""Which tokens a draw may choose from, and with what weight: temperature -> top_k -> typical_p -> top_p -> min_p.

Every filter is a threshold ("all that are at least as good as this one"), so that tokens of equal logits stay together
and the order of a sort never counts. Sums are float64. A row's weights depend on that row alone.

Shape legend: S rows, X tokens: the vocabulary, or the few candidates of each row (-inf in unused places).
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
import torch.nn.functional as F
from torch import Tensor

from app.common.params import SamplingParams

COLDEST = 1e-30
"""Temperatures below count as this one, which float32 can still tell from 0."""
_TRY = 256
_SUMMED = 128
_NOTHING = float("-inf")
_SMALLEST = 5e-324


def weights(logits_SX: Tensor, best_S1: Tensor, params: Items[SamplingParams]) -> Tensor:
    """[S, X] weights, the best logit's 1, 0 for what is filtered out. best_S1: the best logit of each row, finite."""
    shares = [(max(p.temperature, COLDEST), p.typical_p, p.top_p, p.min_p) for p in params]
    shares_S4 = torch.tensor(shares, dtype=torch.float64, device=logits_SX.device)
    temperature_S1, typical_p_S1, top_p_S1, min_p_S1 = (shares_S4[:, i : i + 1] for i in range(4))
    ranked = None
    if logits_SX.shape[1] <= _TRY and any(p.top_k or p.top_p < 1 for p in params):
        ranked = logits_SX.sort(dim=-1, descending=True)
    if any(p.top_k for p in params):
        logits_SX = _keep_top_k(logits_SX, [p.top_k for p in params], ranked and ranked.values)
    # The best goes out first: a tiny temperature must not make infinities of finite logits.
    scaled_SX = (logits_SX - best_S1) / temperature_S1.to(logits_SX.dtype)
    weights_SX: Tensor = scaled_SX.exp()
    if any(p.typical_p < 1 for p in params):
        weights_SX = _keep_typical(weights_SX, scaled_SX, typical_p_S1)
    if any(p.top_p < 1 for p in params):
        if ranked:  # what typical_p left out is 0 among the others, adds nothing, and is never the last one needed
            wanted_S1 = (block_sums(weights_SX)[1][:, -1:] * top_p_S1).clamp(min=_SMALLEST)
            least_S1, _ = edge_in_order(weights_SX.gather(1, ranked.indices), wanted_S1)
        else:
            least_S1 = _edge(weights_SX, weights_SX, top_p_S1)
        weights_SX = weights_SX.where((weights_SX >= least_S1) | (top_p_S1 >= 1), 0.0)
    if any(p.min_p for p in params):
        least_S1 = min_p_S1.to(weights_SX.dtype) * weights_SX.amax(-1, keepdim=True)
        weights_SX = weights_SX.where(weights_SX >= least_S1, 0.0)
    return weights_SX


def block_sums(weights_SX: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of weights [S, B, 128], and the sums up to and with each block [S, B], which end with the row's sum."""
    if spare := -weights_SX.shape[1] % _SUMMED:
        weights_SX = F.pad(weights_SX, (0, spare))
    blocks_SBX = weights_SX.reshape(len(weights_SX), -1, _SUMMED)
    # In blocks: a whole row may be summed in another order when it is alone.
    return blocks_SBX, blocks_SBX.sum(-1, dtype=torch.float64).cumsum(-1)


def edge_in_order(key_SX: Tensor, wanted_S1: Tensor, weights_SX: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[S, 1] the key of the last token that is needed to reach wanted_S1, and whether all of them are enough for it.

    key_SX: the best first, with their weights; without any, the keys are weights themselves.
    """
    sums_SX = (key_SX if weights_SX is None else weights_SX).cumsum(-1, dtype=torch.float64)
    needed_S1 = (sums_SX < wanted_S1).sum(-1, keepdim=True)
    most = key_SX.shape[1]
    return key_SX.gather(1, needed_S1.clamp(max=most - 1)), needed_S1 < most


def _keep_top_k(logits_SX: Tensor, top_k: list[int], best_SX: Tensor | None) -> Tensor:
    """-inf for every token below the k-th best; rows with top_k 0 stay as they are.

    best_SX: the logits from the best on, where they were sorted already.
    """
    width = logits_SX.shape[1]
    limits = [k if 0 < k < width else width for k in top_k]
    if best_SX is None:
        best_SX = logits_SX.topk(max((k for k in limits if k < width), default=1), dim=-1).values
    place_S1 = torch.tensor([min(k, best_SX.shape[1]) - 1 for k in limits], device=logits_SX.device)[:, None]
    off_S1 = torch.tensor([k == width for k in limits], device=logits_SX.device)[:, None]
    return logits_SX.where((logits_SX >= best_SX.gather(1, place_S1)) | off_S1, _NOTHING)


def _keep_typical(weights_SX: Tensor, scaled_SX: Tensor, typical_p_S1: Tensor) -> Tensor:
    """The fewest tokens that together reach typical_p, those first whose surprise is nearest to the entropy."""
    total_S1 = block_sums(weights_SX)[1][:, -1:]
    surprise_SX = total_S1.log() - scaled_SX
    parts_SX = (surprise_SX * weights_SX).where(weights_SX > 0, 0.0)
    entropy_S1 = block_sums(parts_SX)[1][:, -1:] / total_S1
    nearness_SX = (-(surprise_SX - entropy_S1).abs()).where(weights_SX > 0, _NOTHING)
    least_S1 = _edge(nearness_SX, weights_SX, typical_p_S1)
    return weights_SX.where((nearness_SX >= least_S1) | (typical_p_S1 >= 1), 0.0)


def _edge(key_SX: Tensor, weights_SX: Tensor, share_S1: Tensor) -> Tensor:
    """[S, 1] key of the last token needed, highest keys first, until the weights reach this share of their sum."""
    wanted_S1 = block_sums(weights_SX)[1][:, -1:] * share_S1
    least_S1, reached_S1 = _edge_within(key_SX, weights_SX, wanted_S1, min(_TRY, key_SX.shape[1]))
    if key_SX.shape[1] <= _TRY:
        return least_S1
    # Few rows are so flat that it takes more tokens than the first try: only those are sorted.
    wide = (~reached_S1 & (share_S1 < 1)).squeeze(1).nonzero().squeeze(1)
    if len(wide):
        least_S1[wide], _ = _edge_within(key_SX[wide], weights_SX[wide], wanted_S1[wide], key_SX.shape[1])
    return least_S1


def _edge_within(key_SX: Tensor, weights_SX: Tensor, wanted_S1: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The key of the last token that is needed, and whether `most` of them are enough."""
    order = key_SX.topk(most, dim=-1) if most < key_SX.shape[1] else key_SX.sort(dim=-1, descending=True)
    return edge_in_order(order.values, wanted_S1, weights_SX.gather(1, order.indices))
