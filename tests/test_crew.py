"""Work shared out to threads: whose is what, what is raised, and that the gradient is the one of a single thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from model.presets import preset, reshaped
from model.train.crew import in_shares
from model.train.data.batch import of_windows
from model.train.learner import Learner
from model.train.objective import Objective
from model.train.optimiser import Optimiser
from model.train.ranks import Ranks
from model.transformer import Decoder


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

    found = in_shares(work, range(4), workers)
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
        in_shares(work, range(3), 3)
    assert sorted(done) == [number for number in range(3) if number != bad]
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("name", ["nano", "gpt"])
def test_threads_learn_what_one_does_and_the_same_bits_every_time(name: str) -> None:
    config = reshaped(preset(name), n_layers=1, width=64, n_heads=2)
    batch = of_windows(torch.randint(0, config.vocab_size, (4, 17), generator=torch.Generator().manual_seed(4)))
    found = []
    for n_threads, dtype in ((1, torch.float32), (2, torch.float32), (2, torch.bfloat16), (2, torch.bfloat16)):
        torch.set_num_threads(n_threads)
        decoder = Decoder(config).initialise(3)
        optimiser = Optimiser(decoder, "muon", matrix_lr=0.02, other_lr=0.004, weight_decay=0.05)
        objective = Objective(decoder, torch.device("cpu"), dtype)
        Learner(objective, optimiser, ema=0.0, ranks=Ranks(), micro_windows=1).gradients(batch)
        found.append([p.grad for p in decoder.parameters()])
    for one, two, narrow, again in zip(*found, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)
        assert torch.equal(narrow, again)
