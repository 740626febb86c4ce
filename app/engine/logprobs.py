"""Log-probabilities of tokens, drawn or given, and the most likely in their place. Pure functions on tensors.

Shape legend: X rows, V vocabulary, N most likely tokens. The bits of a row depend on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from torch import Tensor

from app.engine.types import TokenScore


def top_logprobs(logits_XV: Tensor, chosen_X: Tensor, counts: Items[int]) -> list[TokenScore]:
    """For each row of finite logits: the chosen token's log-probability, and the `count` most likely tokens.

    Most likely first, the lower id among equals. The chosen token's number is the very one it has among those.
    """
    # log_softmax and not a difference of logsumexp: that one sums a single long row in another order than a batch.
    all_XV = logits_XV.float().log_softmax(-1)
    own = all_XV.gather(1, chosen_X[:, None])[:, 0].tolist()
    ids_XN, values_XN = _best(all_XV, min(max(counts), all_XV.shape[1]))
    table = zip(own, counts, ids_XN.tolist(), values_XN.tolist(), strict=True)
    return [(x, tuple(zip(ids[:n], values[:n], strict=True))) for x, n, ids, values in table]


def _best(all_XV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[X, N] ids and values. Which of equal values topk takes, and in which order, is not said; here ids decide."""
    values_XN, ids_XN = all_XV.topk(count, dim=-1)
    if not count:
        return ids_XN, values_XN
    ids_XN, order_XN = ids_XN.sort(-1)
    values_XN, order_XN = values_XN.gather(1, order_XN).sort(stable=True, dim=-1, descending=True)
    ids_XN = ids_XN.gather(1, order_XN)
    # Rows where more tokens than were taken are as good as the last one: common in bfloat16, rare in float32.
    crowded = ((all_XV >= values_XN[:, -1:]).sum(-1) > count).nonzero()[:, 0].tolist()
    for row in crowded:
        equal_or_better = (all_XV[row] >= values_XN[row, -1]).nonzero()[:, 0]
        values, order = all_XV[row][equal_or_better].sort(stable=True, descending=True)
        ids_XN[row], values_XN[row] = equal_or_better[order[:count]], values[:count]
    return ids_XN, values_XN
