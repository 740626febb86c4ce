"""Distributed training: several processes learn what one learns, one of them writes, and all end together."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from model.train.data.batch import Batch
from model.train.data.sources import DataError
from model.train.step.distributed import ProcessGroup, join
from tests.support.model.training_runs import EXACT, TINY, state_of, train, weights_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]
FLAGS = [*TINY, *EXACT, "--warm-up", "2", "--micro-windows", "1", "--ema", "0.9", "--optimizer", "adamw"]


@dataclass
class Rank:
    """A process of the run: a fork of this one, which has imported torch already."""

    pid: int
    log: Path

    def ended(self) -> int:
        """Its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def printed(self) -> str:
        """What it wrote to stdout."""
        return self.log.with_suffix(".out").read_text()

    def complained(self) -> str:
        """What it wrote to stderr."""
        return self.log.with_suffix(".err").read_text()


def _start(text: Path, out: Path, *flags: str, size: int = 2) -> list[Rank]:
    """What torchrun does."""
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    together = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    out.mkdir(exist_ok=True)

    def learn(number: int, log: Path) -> int:
        os.environ |= {**together, "RANK": str(number), "LOCAL_RANK": str(number)}
        sys.stdout, sys.stderr = log.with_suffix(".out").open("w"), log.with_suffix(".err").open("w")
        return train(text, out, *FLAGS, *flags)

    return [_fork(learn, number, out / f"rank-{number}") for number in range(size)]


def _fork(work: Callable[[int, Path], int], number: int, log: Path) -> Rank:
    pid = os.fork()
    if pid:
        return Rank(pid, log)
    code = 99
    try:
        code = work(number, log)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait_for_snapshot(out: Path) -> None:
    deadline = time.monotonic() + 120
    while not any((out / ".training").glob("step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_ranks_learn_what_one_learns_and_one_of_them_writes(tmp_path: Path, text: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    ranks = _start(text, two, "--steps", "8")
    assert [rank.ended() for rank in ranks] == [0, 0], [rank.complained() for rank in ranks]
    assert "serve it:" in ranks[0].printed() and (ranks[1].printed(), ranks[1].complained()) == ("", "")
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
    out, flags = tmp_path / "out", ["--max-minutes", "5"]
    ranks = _start(text, out, *flags, "--save-seconds", "0.001")
    _wait_for_snapshot(out)
    os.kill(ranks[signaled].pid, signal.SIGTERM)
    assert [rank.ended() for rank in ranks] == [143, 143]
    assert ["everything is saved" in rank.complained() for rank in ranks] == [True, False]
    step, _ = state_of(out)
    assert train(text, out, *FLAGS, "--steps", str(step + 2), "--resume") == 0
    assert state_of(out)[0] == step + 2


def test_who_is_left_alone_ends_in_one_line(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    first, second = _start(text, out, "--max-minutes", "5", "--save-seconds", "0.001")
    _wait_for_snapshot(out)
    os.kill(first.pid, signal.SIGKILL)
    assert (first.ended(), second.ended()) == (-signal.SIGKILL, 1)
    assert "another process of this run has exited" in second.complained()
    assert second.complained().count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--steps", "40", "--lr", "1e30"], 3, "there is no snapshot yet"),
        (["--steps", "4", "--windows", "5"], 2, "--windows 5"),  # found by all ranks at once
        (["--steps", "4", "--vocab-size", "60000"], 2, "--vocab-size"),  # found by each in its turn
    ],
)
def test_what_goes_wrong_in_all_ranks_is_told_once(
    tmp_path: Path, text: Path, flags: list[str], code: int, words: str
) -> None:
    ranks = _start(text, tmp_path / "out", *flags)
    assert [rank.ended() for rank in ranks] == [code, code], [rank.complained() for rank in ranks]
    stderr = "".join(rank.complained() for rank in ranks)
    assert stderr.count("\n") == 1 and words in stderr


def test_sizes_are_told_once(tmp_path: Path, text: Path) -> None:
    ranks = _start(text, tmp_path / "out", "--steps", "4", "--dry-run")
    assert [rank.ended() for rank in ranks] == [0, 0], [rank.complained() for rank in ranks]
    assert ["parameters" in rank.printed() for rank in ranks] == [True, False]


def test_ranks_share_rows_without_losing_one() -> None:
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
