"""The few best tokens of each row, in the order of the vocabulary, without a sort over the vocabulary.

The k-th best of the maxima of small blocks is at most the k-th best value itself, since each maximum is a value. So all
k best tokens, with everything that ties with the last of them, are among the tokens that reach it, and those lie in the
few blocks whose maximum reaches it.

Shape legend: S rows, V vocabulary, B blocks, N tokens of all rows, X = WIDTH places.
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
_BLOCK = 16
_NOTHING = float("-inf")


class Candidates(NamedTuple):
    """At least the k best tokens of each row, those of the same value with them; unused places hold -inf."""

    values_SX: Tensor
    ids_SX: Tensor
    fits_S: Tensor
    """Whether the candidates had room; where not, the row says nothing."""


def candidates(values_SV: Tensor, k: Items[int]) -> Candidates:
    """k: for each row. Tokens of value -inf are none."""
    rows, vocab = values_SV.shape
    device = values_SV.device
    if spare := -vocab % _BLOCK:
        values_SV = F.pad(values_SV, (0, spare), value=_NOTHING)
    blocks_BX = values_SV.reshape(-1, _BLOCK)
    best_SB = blocks_BX.amax(-1).view(rows, -1)
    limits = [min(each, best_SB.shape[1]) for each in k]
    place_S1 = torch.tensor(limits, device=device)[:, None] - 1
    least_S1 = best_SB.topk(max(limits), dim=-1).values.gather(1, place_S1)
    if any(each > best_SB.shape[1] for each in k):
        whole_S1 = torch.tensor([each > best_SB.shape[1] for each in k], device=device)[:, None]
        least_S1 = least_S1.masked_fill(whole_S1, _NOTHING)
    block_B = ((best_SB >= least_S1) & (best_SB > _NOTHING)).view(-1).nonzero().squeeze(1)
    row_B = block_B // best_SB.shape[1]
    held_BX = blocks_BX.index_select(0, block_B)
    at_N, inner_N = ((held_BX >= least_S1[row_B]) & (held_BX > _NOTHING)).nonzero().unbind(1)
    row_N, value_N = row_B[at_N], held_BX[at_N, inner_N]
    id_N = (block_B[at_N] % best_SB.shape[1]) * _BLOCK + inner_N
    count_S = row_N.bincount(minlength=rows)
    # A row's tokens stand side by side: a token's place is its distance from the row's first.
    place_N = torch.arange(len(row_N), device=device) - (count_S.cumsum(0) - count_S)[row_N]
    fits_S = count_S <= WIDTH
    if not fits_S.all():
        row_N, id_N, value_N, place_N = (each[place_N < WIDTH] for each in (row_N, id_N, value_N, place_N))
    flat_N = row_N * WIDTH + place_N
    values_SX = torch.full((rows, WIDTH), _NOTHING, device=device).view(-1).scatter_(0, flat_N, value_N)
    ids_SX = torch.zeros(rows * WIDTH, dtype=torch.int64, device=device).scatter_(0, flat_N, id_N)
    return Candidates(values_SX.view(rows, WIDTH), ids_SX.view(rows, WIDTH), fits_S)
