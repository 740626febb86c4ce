"""The few best tokens of each row, in the order of the vocabulary, without a sort over the vocabulary.

Part the vocabulary into groups: the k-th best of their maxima is at most the k-th best value itself, since each maximum
is a value. So all k best tokens, with everything that ties with the last of them, are among those that reach it; and
these lie in the few blocks of neighbours whose maximum reaches it.

Shape legend: S rows, V vocabulary, B blocks, G groups, N tokens of all rows, X = WIDTH places.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

WIDTH = 128
"""Room for the candidates of a row."""
MOST = 64
"""The largest k for which this room is likely to do."""
_BLOCK = 32
_NOTHING = float("-inf")
_LEAST = torch.finfo(torch.float32).min


class Candidates(NamedTuple):
    """At least the k best tokens of each row, those of the same value with them; unused places hold -inf."""

    values_SX: Tensor
    ids_SX: Tensor
    fits: list[bool]
    """For each row whether its candidates had room; where not, the row says nothing."""


def candidates(values_SV: Tensor, k: Items[int]) -> Candidates:
    """k: for each row. Tokens of value -inf are none."""
    rows, vocab = values_SV.shape
    device = values_SV.device
    if spare := -vocab % _BLOCK:
        values_SV = F.pad(values_SV, (0, spare), value=_NOTHING)
    blocks_BX = values_SV.reshape(-1, _BLOCK)
    best_SB = blocks_BX.amax(-1).view(rows, -1)
    # Groups of tokens far apart: neighbours are alike (frequent tokens have low ids), which would make for a low edge.
    least_S1 = _least(values_SV.reshape(rows, _BLOCK, -1).amax(1), k)
    block_B = (best_SB >= least_S1).view(-1).nonzero().squeeze(1)
    row_B = block_B // best_SB.shape[1]
    held_BX = blocks_BX.index_select(0, block_B)
    place_N = (held_BX >= least_S1[row_B]).view(-1).nonzero().squeeze(1)
    at_N = place_N // _BLOCK
    row_N, value_N = row_B[at_N], held_BX.view(-1)[place_N]
    id_N = (block_B * _BLOCK)[at_N] + place_N % _BLOCK - row_N * values_SV.shape[1]
    count_S = row_N.bincount(minlength=rows)
    # A row's tokens stand side by side: a token's column is its distance from the row's first.
    column_N = torch.arange(len(row_N), device=device) - (count_S.cumsum(0) - count_S)[row_N]
    fits = [count <= WIDTH for count in count_S.tolist()]
    if not all(fits):
        row_N, id_N, value_N, column_N = (each[column_N < WIDTH] for each in (row_N, id_N, value_N, column_N))
    column_N += row_N * WIDTH
    values_SX = torch.full((rows * WIDTH,), _NOTHING, device=device).scatter_(0, column_N, value_N)
    ids_SX = torch.zeros(rows * WIDTH, dtype=torch.int64, device=device).scatter_(0, column_N, id_N)
    return Candidates(values_SX.view(rows, WIDTH), ids_SX.view(rows, WIDTH), fits)


def _least(best_SG: Tensor, k: Items[int]) -> Tensor:
    """[S, 1] what a candidate must reach: the k-th best group, or anything above -inf where groups are fewer than k."""
    n_groups = best_SG.shape[1]
    limits = torch.tensor(k, device=best_SG.device)[:, None]
    best_SX = best_SG.topk(min(max(k), n_groups), dim=-1).values
    if max(k) <= n_groups:
        return best_SX.gather(1, limits - 1).clamp(min=_LEAST)
    least_S1 = best_SX.gather(1, limits.clamp(max=n_groups) - 1)
    return least_S1.masked_fill(limits > n_groups, _NOTHING).clamp(min=_LEAST)
