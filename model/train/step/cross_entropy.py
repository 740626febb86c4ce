"""Cross-entropy of logits and its gradient in one pass, where plain autograd makes four float32 copies of all logits.

Knows no network. Shape legend: T tokens, V vocabulary, S tokens of a slice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_AT_ONCE = 2**18
"""Numbers of a slice: in float32 they stay in a core's own cache."""


def cross_entropy(logits_TV: Tensor, targets_T: Tensor, *, weight: float, ignored: int) -> Tensor:
    """Nats summed over the targets other than `ignored`, times `weight`.

    The logits are used up: their gradient is written over them, in their own format. So their maker must not need them
    for its own gradient; a matrix product does not.
    """
    loss: Tensor = _CrossEntropy.apply(logits_TV, targets_T, weight, ignored)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, weight: float, ignored: int) -> Tensor:
        ctx.gradient_TV = logits_TV.detach()
        size = max(1, _AT_ONCE // logits_TV.shape[1])
        # Made once: fresh memory of this size costs more than what is computed in it.
        room_SV, scores_SV = torch.empty(2, size, logits_TV.shape[1], device=logits_TV.device)
        losses = []
        for slice_SV, targets_S in zip(ctx.gradient_TV.split(size), targets_T.split(size), strict=True):
            n_rows = len(slice_SV)
            losses.append(_in_place(slice_SV, targets_S, weight, ignored, room_SV[:n_rows], scores_SV[:n_rows]))
        return torch.stack(losses).sum() * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        gradient_TV: Tensor = ctx.gradient_TV
        return gradient_TV if grad.is_cpu and float(grad) == 1.0 else gradient_TV.mul_(grad), None, None, None


def _in_place(
    slice_SV: Tensor, targets_S: Tensor, weight: float, ignored: int, room_SV: Tensor, scores_SV: Tensor
) -> Tensor:
    """Logits to their gradient. Returns the sum of the losses."""
    counts_S1 = targets_S.ne(ignored)[:, None]
    targets_S1 = targets_S.clamp(min=0)[:, None]
    torch.softmax(room_SV.copy_(slice_SV), -1, out=scores_SV)
    # log softmax without its pass over exp, which costs more than softmax: the largest logit's is -log of its score.
    largest_S1, most_S1 = (x_SV.amax(-1, keepdim=True) for x_SV in (room_SV, scores_SV))
    losses_S1 = largest_S1 - room_SV.gather(1, targets_S1) - most_S1.log()
    loss = losses_S1.masked_fill(~counts_S1, 0.0).sum()
    scores_SV.scatter_add_(1, targets_S1, torch.full_like(targets_S1, -1, dtype=torch.float32))
    slice_SV.copy_(scores_SV.mul_(counts_S1 * weight))
    return loss
