"""Distributed training: several processes compute what one computes, one of them writes, and all end together."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.train.data.batch import Batch
from model.train.data.sources import DataError
from model.train.step.distributed import GradientSums, ProcessGroup, join
from model.train.step.objective import LossBackend
from tests.support.model.training_runs import EXACT, TINY, state_of, train, weights_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]
FLAGS = [*TINY, *EXACT, "--warm-up", "2", "--micro-windows", "1", "--ema", "0.9", "--optimizer", "adamw"]


class Ranks:
    """Two processes of a run, as torchrun starts them: forks of this process, which has already imported torch."""

    def __init__(self, text: Path, out: Path, *flags: str) -> None:
        torch.set_num_threads(1)  # a fork does not inherit its parent's threads
        with socket.create_server(("127.0.0.1", 0)) as listener:
            together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
        self.out, self.pids = out, list[int]()
        out.mkdir(exist_ok=True)
        for number in range(2):
            if child := os.fork():
                self.pids.append(child)
                continue
            code = 99
            try:
                os.environ |= {**together, "RANK": str(number), "LOCAL_RANK": str(number)}
                sys.stdout, sys.stderr = (self._log(number, stream).open("w") for stream in ("out", "err"))
                code = train(text, out, *FLAGS, *flags)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    def _log(self, number: int, stream: str) -> Path:
        return self.out / f"rank-{number}.{stream}"

    def printed(self, stream: str = "out") -> list[str]:
        """The output of each process."""
        return [self._log(number, stream).read_text() for number in range(2)]

    def exit_codes(self) -> list[int]:
        """Waits for both processes."""
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]

    def signal_after_snapshot(self, number: int, signal_number: signal.Signals) -> None:
        """Sends a signal to one of them."""
        deadline = time.monotonic() + 120
        while not any((self.out / ".training").glob("step-*")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(self.pids[number], signal_number)


@pytest.mark.parametrize("is_handwritten", [True, False])
def test_two_ranks_compute_what_one_does_and_only_one_writes(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, is_handwritten: bool
) -> None:
    """By handwritten gradients, or by autograd as on a GPU."""
    monkeypatch.setattr(
        "model.train.step.trainer.choose_loss_backend", lambda *_, **__: LossBackend(is_handwritten=is_handwritten)
    )
    one, two = tmp_path / "one", tmp_path / "two"
    ranks = Ranks(text, two, "--steps", "8")
    assert ranks.exit_codes() == [0, 0], ranks.printed("err")
    assert "serve it:" in ranks.printed()[0] and (ranks.printed()[1], ranks.printed("err")[1]) == ("", "")
    assert train(text, one, *FLAGS, "--steps", "8") == 0
    logged = [json.loads(line) for line in (two / "log.jsonl").read_text().splitlines()]
    assert len(logged) == len({(record["step"], "held_out" in record) for record in logged}) > 0
    (step, state), (step_of_two, state_of_two) = state_of(one), state_of(two)
    assert step == step_of_two == 8
    assert all(torch.allclose(state[name], state_of_two[name], atol=1e-6) for name in state)
    weights, weights_of_two = weights_of(one), weights_of(two)
    assert all(torch.allclose(weights[name], weights_of_two[name], atol=1e-6) for name in weights)


@pytest.mark.parametrize("signaled", [0, 1])
def test_a_signal_to_either_rank_saves_and_ends_both(tmp_path: Path, text: Path, signaled: int) -> None:
    out = tmp_path / "out"
    ranks = Ranks(text, out, "--max-minutes", "5", "--save-seconds", "0.001")
    ranks.signal_after_snapshot(signaled, signal.SIGTERM)
    assert ranks.exit_codes() == [143, 143]
    assert ["everything is saved" in errors for errors in ranks.printed("err")] == [True, False]
    step, _ = state_of(out)
    assert train(text, out, *FLAGS, "--steps", str(step + 2), "--resume") == 0
    assert state_of(out)[0] == step + 2


def test_rank_that_loses_its_peer_ends_with_one_line(tmp_path: Path, text: Path) -> None:
    ranks = Ranks(text, tmp_path / "out", "--max-minutes", "5", "--save-seconds", "0.001")
    ranks.signal_after_snapshot(0, signal.SIGKILL)
    assert ranks.exit_codes() == [-signal.SIGKILL, 1]
    error = ranks.printed("err")[1]
    assert "another process of this run has exited" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("--steps 40 --lr 1e30", 3, "there is no snapshot yet"),
        ("--steps 4 --windows 5", 2, "--windows 5"),  # detected by all ranks at once
        ("--steps 4 --vocab-size 60000", 2, "--vocab-size"),  # detected by one rank after the other
        ("--steps 4 --dry-run", 0, "it fits; nothing was written"),
    ],
)
def test_errors_of_all_ranks_are_printed_once(tmp_path: Path, text: Path, flags: str, code: int, words: str) -> None:
    ranks = Ranks(text, tmp_path / "out", *flags.split())
    assert ranks.exit_codes() == [code, code], ranks.printed("err")
    output = "".join(ranks.printed("err" if code else "out"))
    assert output.count(words) == 1 and (code == 0 or output.count("\n") == 1)


def test_gradients_are_sent_during_the_backward_pass() -> None:
    """Buckets are sent in one order, last layers first, even without overlap or with an unused parameter."""
    sent: list[tuple[list[int], int]] = []

    class Ranks(ProcessGroup):
        """Two ranks; the other one has the same gradients."""

        def start_sum(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
            sent.append(([tensor.numel() for tensor in tensors], sum(p.grad is not None for p in parameters)))
            return lambda: torch._foreach_mul_(list(tensors), 2)

    layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(6)]
    unused = torch.nn.Parameter(torch.ones(3))
    parameters = [*(layer.weight for layer in layers), unused]
    sums = GradientSums(Ranks(size=2), parameters, bucket_bytes=2 * 8 * 8 * 4)
    expected = None
    for overlaps in (False, True):
        sent.clear()
        torch.nn.Sequential(*layers).zero_grad()
        unused.grad = None
        with sums.overlapped() if overlaps else nullcontext():
            torch.nn.Sequential(*layers)(torch.ones(1, 8)).sum().backward()
            assert not sent, "the first bucket waits for the unused parameter"
        sums.finish()
        assert [numbers for numbers, _ in sent] == [[3, 64, 64], [64, 64], [64, 64]]
        gradients = [p.grad for p in parameters]
        expected = expected or [None if g is None else g.clone() for g in gradients]
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))  # type: ignore[arg-type]
    parameters.pop()
    sums = GradientSums(Ranks(size=2), parameters, bucket_bytes=2 * 8 * 8 * 4)
    sent.clear()
    torch.nn.Sequential(*layers).zero_grad()
    with sums.overlapped():
        torch.nn.Sequential(*layers)(torch.ones(1, 8)).sum().backward()
        assert [count for _, count in sent] == [2, 4, 6], "each bucket as soon as its gradients are ready"
    sums.finish()
    assert len(sent) == 3


def test_ranks_split_all_rows() -> None:
    rows = torch.arange(12).view(6, 2)
    batch = Batch(inputs_RN=rows, targets_RN=rows)
    shares = [ProcessGroup(rank=number, size=3).share(batch).inputs_RN for number in range(3)]
    assert torch.equal(torch.cat(shares), rows)
    assert ProcessGroup().share(batch) is batch
    with pytest.raises(DataError, match="multiple"):
        ProcessGroup(rank=0, size=4).require_divisible(6)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DataError, match="process 2 finds 1 GPUs here"):
        join({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, device="auto")
