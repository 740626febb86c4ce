"""Training thread pool: partition of the work, errors, and the same gradient and update as with one thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor

from model.nn.transformer import Decoder
from model.presets import preset, reshaped
from model.train.common.thread_pool import map_shares, run_each
from model.train.data.batch import batch_of_windows
from model.train.step.distributed import ProcessGroup
from model.train.step.objective import Objective
from model.train.step.optimizer import ParameterUpdates
from model.train.step.trainer import Trainer


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("workers", "shares"), [(1, [[0, 1, 2, 3]]), (3, [[0, 1], [2], [3]]), (9, [[0], [1], [2], [3]])]
)
def test_shares_are_in_order_and_the_last_is_the_callers(workers: int, shares: list[list[int]]) -> None:
    def work(share: Sequence[int]) -> tuple[list[int], int, int]:
        return list(share), threading.get_ident(), torch.get_num_threads()

    found = map_shares(work, range(4), workers)
    assert [share for share, _, _ in found] == shares
    assert found[-1][1] == threading.get_ident()
    assert all(ident != threading.get_ident() for _, ident, _ in found[:-1])
    assert {n_threads for _, _, n_threads in found} == {3 // len(shares) or 1}
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("bad", [0, 2])
def test_what_a_share_raises_reaches_the_caller_when_all_have_ended(bad: int) -> None:
    done = []

    def work(share: Sequence[int]) -> None:
        if bad in share:
            raise RuntimeError("no more")
        done.extend(share)

    with pytest.raises(RuntimeError, match="no more"):
        map_shares(work, range(3), 3)
    assert sorted(done) == [number for number in range(3) if number != bad]
    assert torch.get_num_threads() == 3


def test_each_item_is_done_once_on_one_thread_and_what_one_raises_reaches_the_caller() -> None:
    done = []

    def work(item: int) -> None:
        done.append((item, torch.get_num_threads()))
        if item == 1:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        run_each(work, range(5))
    assert sorted(done) == [(item, 1) for item in range(5)]
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_an_update_has_the_bits_of_torchs_own_whatever_the_threads(kind: Literal["muon", "adamw"]) -> None:
    """More numbers in a matrix than torch sums up on one thread where it has more."""
    config = reshaped(preset("nano"), n_layers=2, width=256, n_heads=4)
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


@pytest.mark.parametrize("name", ["nano", "gpt"])
def test_threads_learn_what_one_does_and_the_same_bits_every_time(name: str) -> None:
    config = reshaped(preset(name), n_layers=1, width=64, n_heads=2)
    batch = batch_of_windows(torch.randint(0, config.vocab_size, (4, 17), generator=torch.Generator().manual_seed(4)))
    found = []
    for n_threads, dtype in ((1, torch.float32), (2, torch.float32), (2, torch.bfloat16), (2, torch.bfloat16)):
        torch.set_num_threads(n_threads)
        decoder = Decoder(config).initialize(3)
        optimiser = ParameterUpdates(decoder, "muon", matrix_lr=0.02, other_lr=0.004, weight_decay=0.05)
        objective = Objective(decoder, torch.device("cpu"), dtype)
        Trainer(objective, optimiser, ema=0.0, ranks=ProcessGroup(), micro_windows=1).gradients(batch)
        found.append([p.grad for p in decoder.parameters()])
    for one, two, narrow, again in zip(*found, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)
        assert torch.equal(narrow, again)
