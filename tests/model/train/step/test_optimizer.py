"""Updates equal torch's optimizers bit for bit with any number of threads; stacked Muon steps follow torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.optim import Muon
from torch.utils._python_dispatch import TorchDispatchMode

from model.nn.transformer import Decoder
from model.presets import preset, reshaped
from model.train.step.optimizer import ParameterUpdates, step_stacked

_SHAPES = ((24, 24), (24, 24), (48, 24), (24, 48), (24, 48), (40, 24))
_SETTINGS = {"lr": 0.02, "weight_decay": 0.05, "momentum": 0.95}


def _matrices() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in _SHAPES]


def _gradients_of(matrices: list[Tensor], step: int) -> None:
    for i, matrix in enumerate(matrices):
        generator = torch.Generator().manual_seed(100 * step + i)
        matrix.grad = torch.randn(matrix.shape, generator=generator) * 10.0**-i


def test_stacked_steps_follow_torchs_own() -> None:
    plain, stacked = _matrices(), _matrices()
    start = [matrix.detach().clone() for matrix in plain]
    reference = Muon(plain, **_SETTINGS)
    optimizers = [Muon([matrix], **_SETTINGS) for matrix in stacked]
    for step in range(4):
        _gradients_of(plain, step)
        _gradients_of(stacked, step)
        reference.step()
        step_stacked(optimizers)
    for one, two, before, optimizer in zip(plain, stacked, start, optimizers, strict=True):
        moved = (one - before).norm()
        assert moved > 0.1
        assert (two - one).norm() < 0.01 * moved, tuple(one.shape)
        assert torch.allclose(optimizer.state[two]["momentum_buffer"], reference.state[one]["momentum_buffer"])
        assert two.grad is None


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_update_has_the_bits_of_torchs_own_with_any_number_of_threads(kind: Literal["muon", "adamw"]) -> None:
    """A matrix with more elements than torch sums on one thread if it has several."""
    config = reshaped(preset("nano"), n_layers=1, width=256, n_heads=4)
    generator = torch.Generator().manual_seed(5)
    gradients = [torch.randn(p.shape, generator=generator) for p in Decoder(config).parameters()]
    found = []
    for n_threads in (1, 2, 3):
        torch.set_num_threads(n_threads)
        decoder = Decoder(config).initialize(3)
        optimiser = ParameterUpdates(decoder, kind, matrix_lr=0.02, other_lr=0.004, weight_decay=0.05)
        for _ in range(2):
            _give(decoder, gradients)
            optimiser.step(0.5)
        found.append(list(decoder.parameters()))
    torch.set_num_threads(1)
    decoder = Decoder(config).initialize(3)
    for part in _of_torch(decoder, kind):
        for _ in range(2):
            _give(decoder, gradients)
            part.step()
    for plain, *ours in zip(decoder.parameters(), *found, strict=True):
        assert all(torch.equal(one, plain) for one in ours)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_device_update_has_the_state_of_a_cpu_update_in_few_launches(
    kind: Literal["muon", "adamw"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fused AdamW for each weight decay; each can resume from a snapshot of the other."""
    config = reshaped(preset("nano"), n_layers=2, width=64, n_heads=2)
    gradients = [torch.randn(p.shape, generator=torch.Generator().manual_seed(5)) for p in Decoder(config).parameters()]
    found = []
    for is_cpu in (True, False):
        monkeypatch.setattr(torch.Tensor, "is_cpu", is_cpu)
        decoder = Decoder(config).initialize(3)
        updates = ParameterUpdates(decoder, kind, matrix_lr=0.02, other_lr=0.004, weight_decay=0.05)
        for _ in range(2):
            _give(decoder, gradients)
            with _Calls() as calls:
                updates.step(0.5)
        found.append((list(decoder.parameters()), updates, calls.names))
    (weights, plain, _), (weights_of_device, device, names) = found
    assert names.count("_fused_adamw_") == (1 if kind == "muon" else 2)
    assert set(plain.tensors()) == set(device.tensors()) and len(plain.tensors()) > 10
    for one, two in zip(weights, weights_of_device, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3 if kind == "muon" else 0.0, atol=1e-3 if kind == "muon" else 0.0)
    for source, target in ((plain, device), (device, plain)):
        target.load_tensors(source.tensors())
        for name, tensor in source.tensors().items():
            assert torch.equal(target.tensors()[name], tensor), name


class _Calls(TorchDispatchMode):
    """Records the names of operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _give(decoder: Decoder, gradients: list[Tensor]) -> None:
    for parameter, gradient in zip(decoder.parameters(), gradients, strict=True):
        parameter.grad = gradient.clone()


def _of_torch(decoder: Decoder, kind: str) -> list[torch.optim.Optimizer]:
    matrices = [p for p in decoder.blocks.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = {"params": [p for p in decoder.parameters() if id(p) not in chosen], "weight_decay": 0.0}
    if kind == "adamw":
        decayed = {"params": matrices, "weight_decay": 0.05}
        return [torch.optim.AdamW([others, decayed], lr=0.002, betas=(0.9, 0.95), fused=True)]
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.05, momentum=0.95)
    return [muon, torch.optim.AdamW([others], lr=0.002, betas=(0.9, 0.95), fused=True)]
