"""The GPU backend with Triton's kernels: the tokens of the torch backend, in the interpreter or on a GPU."""

from __future__ import annotations

import warnings

import pytest
import torch
from msgspec.structs import replace

from app.engine.execution.warmup_batches import dummies
from app.engine.gpu.graphs import CudaCapture
from app.engine.gpu.triton_loader import triton_kernels
from tests.engine.execution.test_parity import _requests
from tests.support.gpu.emulated_engine import tiny_device_engine, tiny_device_runner
from tests.support.gpu.kernel_backends import DEVICE, needs_triton
from tests.support.model.tiny_models import run_all, tiny_decoder, tiny_engine

pytestmark = pytest.mark.slow


@needs_triton
def test_triton_draws_the_tokens_of_the_torch_way() -> None:
    requests = [replace(r, prompt=r.prompt[-30:], max_tokens=min(5, r.max_tokens)) for r in _requests(3, seed=1)]
    wanted = run_all(tiny_engine(tiny_decoder()), requests)
    found = triton_kernels()
    assert found and found.numerics.startswith("triton-3.")
    decoder = tiny_decoder().to(DEVICE)
    engine = tiny_device_engine(decoder, max_running=2, tokens_per_step=40, kernels=found.kernels)
    for name, events in run_all(engine, requests).items():
        assert [event.token for event in events] == [event.token for event in wanted[name]]


@pytest.mark.skipif(DEVICE != "cuda", reason="takes a GPU, where torch raises at what waits")
def test_cuda_is_not_waited_for_while_steps_are_launched() -> None:
    """Captured decode steps and steps with prompts alike: what waits is collect()."""
    found = triton_kernels()
    assert found
    runner = tiny_device_runner(tiny_decoder().to(DEVICE), max_running=8, kernels=found.kernels)
    runner.warm_up(128)
    runner.capture(CudaCapture())
    for plan in (dummies(3, 1), dummies(2, 30), dummies(8, 1)):
        with warnings.catch_warnings(action="ignore"):  # of the mode itself, once
            torch.cuda.set_sync_debug_mode("error")
        try:
            flight = runner.launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(runner.collect(flight).sampled) == len(plan.chunks)
