"""The int8 kernel in Triton's interpreter, beside its twin, and compiled for sm_90. Nothing of this ran on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from app.engine.kernels import int8
from app.engine.kernels.int8 import dequantised_product
from app.engine.quantize import Quantized, quantize

ROOT = Path(__file__).parent.parent
os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    return import_module("app.engine.kernels.triton_int8")


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _whole(*shape: int, seed: int = 0) -> Tensor:
    """Numbers whose products and sums are exact in float32, in whatever order."""
    return _normal(*shape, seed=seed).mul(3).round()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 70, 96), (16, 64, 128), (17, 130, 200), (3, 8, 272)])
def test_the_kernel_gives_what_its_twin_gives(
    kernel: ModuleType, tokens: int, rows: int, columns: int, has_bias: bool
) -> None:
    x, weight, bias = _normal(tokens, columns), quantize(_normal(rows, columns, seed=1)), _normal(rows, seed=2)
    given = bias if has_bias else None
    out = kernel.product(x, weight, given)
    assert torch.allclose(out, dequantised_product(x, weight, given), rtol=1e-5, atol=1e-4)


def test_every_token_of_every_tile_is_computed_from_its_own_row(kernel: ModuleType) -> None:
    """Exact sums, so that a bit that differs is a number in the wrong place; rows of x may be apart."""
    numbers = _whole(130, 200, seed=1).to(torch.int8)
    weight = Quantized(numbers, torch.full((130,), 0.5))
    wide = _whole(70, 300)
    together = kernel.product(wide[:, :200], weight, None)
    assert torch.equal(together, wide[:, :200] @ numbers.float().t() * 0.5)
    for few in (1, 16, 17):
        assert torch.equal(kernel.product(wide[:few, :200], weight, None), together[:few])


def test_few_tokens_have_a_tile_of_their_own(kernel: ModuleType) -> None:
    assert [kernel.tile(n)[0] for n in (1, 16, 17, 64, 100_000)] == [16, 16, 64, 64, 64]


def test_the_door_opens_to_the_kernel_where_there_is_a_gpu(kernel: ModuleType) -> None:
    assert int8.int8_product(torch.device("cuda"), torch.bfloat16) is kernel.product


def test_it_compiles_for_hopper_with_one_kind_of_matrix_unit() -> None:
    """Of 16 tokens as of 64: 64 rows of the weight, 16 columns at a time, so that sums should be made in one order."""
    variables = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, str(ROOT / "tests/compile_int8.py")]
    found = json.loads(subprocess.run(command, env=variables, capture_output=True, check=True, text=True).stdout)
    unit = "wgmma.mma_async.sync.aligned.m64n{}k16.f32.bf16.bf16"
    assert found["decode"]["units"] == [unit.format(16)]
    assert found["prefill"]["units"] == found["odd"]["units"] == [unit.format(64)]
    for facts in found.values():
        assert facts["binary"] and facts["copies"], "loads wait for one another"
        assert facts["shared"] <= 227 << 10 >> 1, "two programs fit on a multiprocessor"
