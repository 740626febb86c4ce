"""One update of Muon for many matrices: those of one shape are stacked, and each product is one launch for all of them.

torch.optim.Muon orthogonalizes one matrix after another: about 25 kernels for each, 1,800 for ten layers, which keep a
GPU waiting for its launches. Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
Shape legend: M matrices of one shape, A rows, B columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Muon


@torch.no_grad()
def step_stacked(optimizers: Sequence[Muon]) -> None:
    """What step() and zero_grad() of each optimizer do, which has one matrix; their settings but `lr` must be equal.

    State stays where torch keeps it. Numbers differ from torch's by rounding: a batched product sums in another order.
    """
    by_shape = defaultdict[torch.Size, list[Muon]](list)
    for optimizer in optimizers:
        if _matrix(optimizer).grad is not None:
            by_shape[_matrix(optimizer).shape].append(optimizer)
    for group in by_shape.values():
        _step(group)


def orthogonalized(
    matrices_MAB: Tensor, *, coefficients: tuple[float, float, float], steps: int, epsilon: float
) -> Tensor:
    """[M, A, B] bfloat16: near U V^T of each matrix U S V^T, by Newton-Schulz iterations of the fifth order."""
    a, b, c = coefficients
    is_tall = matrices_MAB.shape[1] > matrices_MAB.shape[2]
    x_MAB = matrices_MAB.bfloat16()
    x_MAB = x_MAB.mT.contiguous() if is_tall else x_MAB
    x_MAB = x_MAB / torch.linalg.vector_norm(x_MAB, dim=(1, 2), keepdim=True).clamp(min=epsilon)
    for _ in range(steps):
        gram_MAA = x_MAB @ x_MAB.mT
        x_MAB = torch.baddbmm(x_MAB, torch.baddbmm(gram_MAA, gram_MAA, gram_MAA, beta=b, alpha=c), x_MAB, beta=a)
    return x_MAB.mT if is_tall else x_MAB


def _step(optimizers: list[Muon]) -> None:
    """Of one shape."""
    matrices, settings = [_matrix(optimizer) for optimizer in optimizers], optimizers[0].param_groups[0]
    gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
    buffers = [_momentum(optimizer) for optimizer in optimizers]
    torch._foreach_lerp_(buffers, gradients, 1 - settings["momentum"])
    updates = torch._foreach_lerp(gradients, buffers, settings["momentum"]) if settings["nesterov"] else buffers
    updates_MAB = orthogonalized(
        torch.stack(list(updates)),
        coefficients=settings["ns_coefficients"],
        steps=settings["ns_steps"],
        epsilon=settings["eps"],
    )
    rate = settings["lr"] * math.sqrt(max(1.0, updates_MAB.shape[1] / updates_MAB.shape[2]))
    torch._foreach_mul_(matrices, 1 - settings["lr"] * settings["weight_decay"])
    torch._foreach_add_(matrices, list(updates_MAB.to(matrices[0].dtype).unbind()), alpha=-rate)
    for matrix in matrices:
        matrix.grad = None


def _matrix(optimizer: Muon) -> Tensor:
    matrix: Tensor = optimizer.param_groups[0]["params"][0]
    return matrix


def _momentum(optimizer: Muon) -> Tensor:
    state = optimizer.state[_matrix(optimizer)]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(_matrix(optimizer))
    buffer: Tensor = state["momentum_buffer"]
    return buffer
