"""Stacked Muon moves every matrix as torch.optim.Muon does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.optim import Muon

from model.train.step.optimizer import orthogonalized, step_stacked

_SHAPES = ((24, 24), (24, 24), (48, 24), (24, 48), (24, 48), (40, 24))
_SETTINGS = {"lr": 0.02, "weight_decay": 0.05, "momentum": 0.95}


def _matrices() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in _SHAPES]


def _give(matrices: list[Tensor], step: int) -> None:
    for i, matrix in enumerate(matrices):
        generator = torch.Generator().manual_seed(100 * step + i)
        matrix.grad = torch.randn(matrix.shape, generator=generator) * 10.0**-i


def test_stacked_steps_follow_torchs_own() -> None:
    plain, stacked = _matrices(), _matrices()
    start = [matrix.detach().clone() for matrix in plain]
    reference = Muon(plain, **_SETTINGS)
    optimizers = [Muon([matrix], **_SETTINGS) for matrix in stacked]
    for step in range(4):
        _give(plain, step)
        _give(stacked, step)
        reference.step()
        step_stacked(optimizers)
    for one, two, before, optimizer in zip(plain, stacked, start, optimizers, strict=True):
        moved = (one - before).norm()
        assert moved > 0.1
        assert (two - one).norm() < 0.01 * moved, tuple(one.shape)
        assert torch.allclose(optimizer.state[two]["momentum_buffer"], reference.state[one]["momentum_buffer"])
        assert two.grad is None


def test_a_matrix_without_a_gradient_stays_as_it_is() -> None:
    first, second = _matrices()[:2]
    optimizers = [Muon([matrix], **_SETTINGS) for matrix in (first, second)]
    before = second.detach().clone()
    first.grad = torch.ones_like(first)
    step_stacked(optimizers)
    assert torch.equal(second, before)
    assert not torch.equal(first, _matrices()[0])


@pytest.mark.parametrize("shape", [(3, 20, 50), (3, 50, 20)])
def test_singular_values_come_near_one(shape: tuple[int, int, int]) -> None:
    matrices_MAB = (
        torch.randn(shape, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    )
    found_MAB = orthogonalized(matrices_MAB, coefficients=(3.4445, -4.775, 2.0315), steps=5, epsilon=1e-7)
    values_MS = torch.linalg.svdvals(found_MAB.float())
    assert found_MAB.shape == shape
    assert values_MS.min() > 0.4 and values_MS.max() < 1.4
