"""Distributed training: several processes learn what one learns, one of them writes, and all end together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from model.train.data.batch import Batch
from model.train.data.sources import DataError
from model.train.step.distributed import ProcessGroup, join
from tests.support import ROOT
from tests.support.model.training_runs import EXACT, SMALL, TINY, state_of, train, weights_of

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


def test_a_fault_of_all_ranks_is_told_once(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    ranks = _start(text, out, "--steps", "40", "--lr", "1e30")
    assert [rank.ended() for rank in ranks] == [3, 3]
    assert [rank.complained().count("\n") for rank in ranks] == [1, 0]


@pytest.mark.parametrize("flags", [["--windows", "5"], ["--vocab-size", "60000"]])
def test_bad_input_is_told_once(tmp_path: Path, text: Path, flags: list[str]) -> None:
    """The first is found by all ranks at once, the second by the first one in its turn."""
    ranks = _start(text, tmp_path / "out", "--steps", "4", *flags)
    assert [rank.ended() for rank in ranks] == [2, 2], [rank.complained() for rank in ranks]
    stderr = "".join(rank.complained() for rank in ranks)
    assert stderr.count("\n") == 1 and flags[0] in stderr


def test_sizes_are_told_once(tmp_path: Path, text: Path) -> None:
    ranks = _start(text, tmp_path / "out", "--steps", "4", "--dry-run")
    assert [rank.ended() for rank in ranks] == [0, 0], [rank.complained() for rank in ranks]
    assert ["parameters" in rank.printed() for rank in ranks] == [True, False]


class FakeStore:
    """An in-process store whose reads never wait for a missing key."""

    def __init__(self) -> None:
        self.written: Counter[str] = Counter()
        self.patience: list[timedelta] = []

    def set(self, key: str, _value: str) -> None:
        self.written[key] += 1

    def wait(self, keys: list[str], limit: timedelta) -> None:
        assert all(self.written[key] for key in keys)
        self.patience.append(limit)

    def add(self, key: str, value: int) -> int:
        self.written[key] += value
        return self.written[key]


def test_who_waits_for_its_turn_may_wait_for_longer_than_for_numbers() -> None:
    """The first rank may tokenise for hours, where a backend gives its exchanges minutes."""
    store = FakeStore()
    first, second = (ProcessGroup(rank=number, size=2, store=store) for number in range(2))
    assert first.main_process_first(lambda: "made") == "made"
    with pytest.raises(DataError):
        first.main_process_first(_refuse)  # the others find the same, and do not wait for ever
    assert second.main_process_first(lambda: "found") == "found"
    with pytest.raises(DataError):
        second.main_process_first(_refuse)
    assert min(store.patience) >= timedelta(days=1)
    assert [rank.claims_message("no such file") for rank in (second, first)] == [True, False]


def _refuse() -> None:
    raise DataError("no such file")


def test_torchrun_starts_and_ends_them(tmp_path: Path, text: Path, nightly: bool) -> None:
    """The launcher itself, whose SIGTERM becomes one to each rank; three times the import of torch."""
    if not nightly:
        pytest.skip("--nightly")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [*launcher, "model.train", "--data", str(text), "--out", str(tmp_path / "out"), *SMALL, *FLAGS]
    limits = ["--max-minutes", "5", "--save-seconds", "0.001"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *limits], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    _wait_for_snapshot(tmp_path / "out")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert errors.count("everything is saved") == 1
    assert state_of(tmp_path / "out")[0] > 0


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


def test_waiting_reads_what_was_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU only begins to exchange: who does not read the result has not waited."""
    read: list[str] = []

    class Late(float):
        def __float__(self) -> float:
            read.append("read")
            return 0.0

    monkeypatch.setattr("model.train.step.distributed.dist.all_reduce", lambda *_: None)
    monkeypatch.setattr("model.train.step.distributed.torch.tensor", lambda *_, **__: [Late(), 0])
    ProcessGroup(rank=1, size=2).barrier()
    assert read == ["read"]


def test_one_process_alone_exchanges_nothing() -> None:
    alone = join({}, device="cpu")
    assert alone.is_main and alone.size == 1
    assert alone.all_reduce_max(2.5, 15) == (2.5, 15)
    assert alone.main_process_first(lambda: "done") == "done"
    tensor = torch.ones(2)
    alone.all_reduce_sum([tensor])
    assert tensor.tolist() == [1.0, 1.0]
