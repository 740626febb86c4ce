"""The draw itself: of each row's weights the place that a number in [0, 1) stands for. Knows no filters.

By the inverse of the cumulative distribution, in the order of the vocabulary, without a look at a value: so it also
runs where nobody may wait for the device.

Shape legend: S rows, X tokens to choose from, B blocks of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.engine.sampling.filters import block_sums


def places(weights_SX: Tensor, numbers_S1: Tensor) -> Tensor:
    """[S] the first place at which the sum of the weights exceeds the number times the whole sum."""
    blocks_SBX, sums_SB = block_sums(weights_SX)
    target_S1 = numbers_S1 * sums_SB[:, -1:]
    if sums_SB.shape[1] == 1:
        return _first_above(blocks_SBX.squeeze(1).cumsum(-1, dtype=torch.float64), target_S1).squeeze(1)
    block_S1 = _first_above(sums_SB, target_S1)
    within_SX = blocks_SBX.gather(1, block_S1[:, :, None].expand(-1, -1, blocks_SBX.shape[2])).squeeze(1)
    before_S1 = sums_SB.gather(1, (block_S1 - 1).clamp(min=0)).where(block_S1 > 0, 0.0)
    place_S1 = _first_above(within_SX.cumsum(-1, dtype=torch.float64), target_S1 - before_S1)
    return (block_S1 * blocks_SBX.shape[2] + place_S1).squeeze(1)


def _first_above(sums_SX: Tensor, target_S1: Tensor) -> Tensor:
    """[S, 1] where the sums first exceed the target. Rounding may reach the last sum; then the last that adds to it."""
    last_S1 = torch.searchsorted(sums_SX, sums_SX[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(sums_SX, target_S1, right=True), last_S1)
