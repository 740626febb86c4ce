"""Log-probabilities of tokens, drawn or given, and the most likely in their place. Pure functions on tensors.

Shape legend: X rows, V vocabulary, N most likely tokens, W rows too crowded for a short list. The bits of a row depend
on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from app.common.types import TokenScore
from app.engine.sampling.candidates import candidates

_LEAST = torch.finfo(torch.float32).min


def top_logprobs(logits_XV: Tensor, chosen_X: Tensor, counts: Items[int]) -> list[TokenScore]:
    """For each row of finite logits: the chosen token's log-probability, and the `count` most likely tokens.

    Most likely first, the lower id among equals. The chosen token's number is the very one it has among those.
    """
    # log_softmax and not a difference of logsumexp: that one sums a single long row in another order than a batch.
    # Held above -inf, which a finite logit far below the others may come to.
    all_XV = logits_XV.float().log_softmax(-1).clamp_(min=_LEAST)
    own = all_XV.gather(1, chosen_X[:, None])[:, 0].tolist()
    most = min(max(counts), all_XV.shape[1])
    if not most:
        return [(x, ()) for x in own]
    ids_XN, values_XN = _best(all_XV, most)
    table = zip(own, counts, ids_XN.tolist(), values_XN.tolist(), strict=True)
    return [(x, tuple(zip(ids[:n], values[:n], strict=True))) for x, n, ids, values in table]


def _best(all_XV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[X, N] ids and values. Candidates lie in the order of the vocabulary; a stable sort leaves equal ones in it."""
    found = candidates(all_XV, [count] * len(all_XV))
    values_XN, order_XN = found.values_SX.sort(dim=-1, descending=True, stable=True)
    values_XN, ids_XN = values_XN[:, :count], found.ids_SX.gather(1, order_XN[:, :count])
    # Rows where very many tokens are as good as the last one: common where all logits are equal.
    crowded = [row for row, fits in enumerate(found.fits) if not fits]
    if crowded:
        values_WV, ids_WV = all_XV[crowded].sort(dim=-1, descending=True, stable=True)
        values_XN[crowded], ids_XN[crowded] = values_WV[:, :count], ids_WV[:, :count]
    return ids_XN, values_XN
