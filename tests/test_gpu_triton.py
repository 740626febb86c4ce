"""The device's whole way with Triton's kernels: the tokens of the torch way, in the interpreter or on a GPU."""

from __future__ import annotations

from gpu import DEVICE, needs_triton
from msgspec.structs import replace
from on_device import tiny_device_engine
from test_parity import _requests
from tiny import run_all, tiny_decoder, tiny_engine

from app.engine.kernels.door import triton_kernels


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
