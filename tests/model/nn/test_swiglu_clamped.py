"""The clamped SwiGLU against its formula, number by number."""

from __future__ import annotations

import math

import pytest
import torch

from model.nn.layers import activate_hidden


def _wanted(gate: float, up: float) -> float:
    gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
    return (up + 1) * gate / (1 + math.exp(-1.702 * gate))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)]
)
def test_numbers_on_both_sides_of_the_limits_equal_the_formula(dtype: torch.dtype, tolerance: float) -> None:
    numbers = torch.tensor([-300.0, -7.5, -7.0, -1.0, 0.0, 0.5, 6.75, 7.0, 7.5, 300.0], dtype=dtype)
    hidden_TX = torch.cartesian_prod(numbers, numbers)
    found_T = activate_hidden("swiglu_clamped", hidden_TX, gated=True).flatten()
    assert found_T.dtype == dtype
    for (gate, up), found in zip(hidden_TX.tolist(), found_T.tolist(), strict=True):
        assert found == pytest.approx(_wanted(gate, up), rel=tolerance, abs=1e-30), (gate, up)
