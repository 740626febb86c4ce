"""After kill -9 of everything under load the service restarts at once on its port, leaves no file and no process,
and returns the same output; after a kill at any moment of a checkpoint save the newest good checkpoint loads, and no
stale file is taken for one.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch

from model.train.training_checkpoint import load_snapshot
from tests.promises.test_r18_disk_full import _save_run, _version_of_run
from tests.support import ROOT
from tests.support.armed_faults import Faults
from tests.support.disk_faults import Operations, intercept_writes, kill
from tests.support.fake_compiler import fake_compiler
from tests.support.load.concurrent_clients import (
    RequestSpec,
    children,
    compare_outputs,
    concurrent_requests,
    engine_pid,
    engine_pids,
    outputs,
    send_all,
)
from tests.support.model.tiny_models import TEXT
from tests.support.processes import living
from tests.support.promise_figures import Promise
from tests.support.servers import Server, free_ports
from tests.support.services import Services
from tests.support.trials import Trials

_SPECS = [
    RequestSpec(body={"prompt": "Once", "max_tokens": 150, "ignore_eos": True, "seed": seed, "temperature": 1.0})
    for seed in range(16)
]
_LONG = [RequestSpec(body={**spec.body, "max_tokens": 8000}) for spec in _SPECS]
"""They take 40 s if not interrupted."""


def _kill_all(server: Server, *, api_first: bool) -> list[int]:
    pids = [server.process.pid, *children(server)]
    for pid in pids if api_first else reversed(pids):
        with suppress(ProcessLookupError):  # a process whose parent was killed first may have exited already
            os.kill(pid, signal.SIGKILL)
    server.process.wait()
    return pids


def test_service_restarts_after_kill_9_of_every_process(
    serve: Services, tmp_path: Path, weights: Path, promise: Promise
) -> None:
    rounds, rng = promise.size(2, 50), random.Random(12)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {"TMPDIR": str(scratch), "XDG_CACHE_HOME": str(scratch / "cache")}
    before = _files(weights)
    flags = ("--port", str(free_ports(1)[0]))

    def start(wait: bool = True) -> Server:
        return serve(*flags, fake_ms=5, environment=environment, wait=wait)

    server = start()
    expected = outputs(send_all(server, _SPECS))
    trials = Trials()
    for number in range(rounds):
        with concurrent_requests(server, _SPECS):
            time.sleep(rng.uniform(0.05, 0.5))
            pids = _kill_all(server, api_first=number % 2 == 0)
        if number % 4 == 3:  # every fourth round also kills a starting service
            server = start(wait=False)
            time.sleep(rng.uniform(0.0, 0.5))
            pids += _kill_all(server, api_first=True)
        server = start()
        answers = compare_outputs(server, send_all(server, _SPECS), expected)
        clean = not any(scratch.iterdir()) and _files(weights) == before
        ended = server.wait_for(lambda pids=pids: not living(pids))  # type: ignore[misc]
        trials.compare(("", True, True), (answers.first_difference, clean, ended), log=server.log)
    promise.all_of("successful starts after kill -9 of everything under load", trials)


def _files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def _die_with_killed_service(server: Server, pids: list[int], seconds: float = 10.0) -> bool:
    server.process.kill()
    server.process.wait()
    return server.wait_for(lambda: not living(pids), seconds)


@pytest.mark.parametrize("fault", ["hold gil", "stop"])
def test_hung_or_stopped_engine_dies_with_a_killed_service(serve: Services, faults: Faults, fault: str) -> None:
    """The engine dies even if it cannot read its pipe."""
    server = serve(fake_ms=5, environment=faults.environment)
    with concurrent_requests(server, _LONG) as answers:
        assert server.wait_for(lambda: answers[0].n_events > 2)
        faults.arm("engine.step", fault, times=1)
        assert server.wait_for(lambda: not faults.is_armed("engine.step")), "the fault was not triggered"
        assert _die_with_killed_service(server, [engine_pid(server)], 3)


def test_loading_engine_dies_with_a_killed_service(serve: Services, faults: Faults) -> None:
    faults.arm("engine.load", "sleep", times=1)
    server = serve(fake_ms=5, environment=faults.environment, wait=False)
    assert server.wait_for(lambda: bool(engine_pids(server)))
    engine = engine_pid(server)
    assert server.wait_for(lambda: not faults.is_armed("engine.load")), "the fault was not triggered"
    assert _die_with_killed_service(server, [engine], 3)


def _save_and_die(folder: Path, at: int) -> int:
    """A child process saves number 2 and is killed at operation `at`; returns its exit code."""
    child = os.fork()
    if child == 0:
        with intercept_writes(Operations(kill, at)):
            _save_run(folder, 2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_save_killed_at_any_operation_keeps_a_good_snapshot(tmp_path: Path, promise: Promise) -> None:
    torch.set_num_threads(1)
    counting = Operations()
    _save_run(tmp_path / "dry", 1)
    with intercept_writes(counting):
        _save_run(tmp_path / "dry", 2)
    good = 0
    for number, what in enumerate(counting.seen):
        folder = tmp_path / str(number)
        _save_run(folder, 1)
        assert _save_and_die(folder, number) == -signal.SIGKILL
        renamed = "rename" in counting.seen[:number]
        kept = _version_of_run(folder)
        _save_run(folder, 3)  # leftovers of the killed save must not block it
        clean = [path.name for path in folder.iterdir()] == ["step-00000003"]
        good += kept == (2 if renamed else 1) and clean
        print(number, what, kept, clean)
    promise.all_of(
        "saves killed at each operation after which the newest good snapshot loads", good, len(counting.seen)
    )


def test_truncated_snapshot_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control: an invalid directory under a checkpoint's name is reported and not loaded."""
    _save_run(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000009")
    state = tmp_path / "step-00000009/state.safetensors"
    state.write_bytes(state.read_bytes()[:-100])
    assert _version_of_run(tmp_path) == 1
    assert "damaged snapshot" in capsys.readouterr().out


def _train(text: Path, out: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "model.train", "--data", str(text), "--out", str(out), "--preset", "nano"]
    command += ["--vocab-size", "300", "--context", "32", "--windows", "4", "--device", "cpu", "--steps", "100000"]
    command += ["--save-seconds", "0.001", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def _wait_for_save(process: subprocess.Popen[bytes], work: Path, after: int) -> None:
    """Waits until a save of a step beyond `after` has started."""
    deadline = time.monotonic() + 60
    while True:
        steps = [int(path.name[6:]) for path in work.glob(".step-*")]
        if any(step > after for step in steps):
            return
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def test_training_killed_while_saving_resumes_from_the_newest_snapshot(tmp_path: Path, promise: Promise) -> None:
    """The real script, repeatedly killed during a save and restarted with --resume."""
    (tmp_path / "text.txt").write_text(TEXT * 5)
    work, n, good, last = tmp_path / "out/.training", promise.size(2, 50), 0, 0
    rng = random.Random(12)
    for number in range(n):
        process = _train(tmp_path / "text.txt", tmp_path / "out", *(["--resume"] if number else []))
        try:
            _wait_for_save(process, work, last + 1)
            time.sleep(rng.uniform(0, 0.02))
        finally:
            process.kill()
            process.communicate()
        named = sorted(int(path.name[5:]) for path in work.glob("step-*"))
        found = load_snapshot(work)
        good += found is not None and found[0].step == named[-1] > last
        last = named[-1]
    promise.all_of("training runs killed while saving that resume from the newest snapshot", good, n)


def test_running_engine_and_grammar_validators_die_with_a_killed_service(serve: Services) -> None:
    server = serve(fake_ms=5)
    guided = {"prompt": "a", "regex": "[ab]{5}", "max_tokens": 8, "stream": False}
    assert httpx.post(f"{server.url}/complete", json=guided, timeout=60).status_code == 200
    pids = children(server)
    validators = [pid for pid in pids if b"validator_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    # One that is stopped while it starts cannot yet ask the kernel for its parent's death.
    assert server.wait_for(lambda: all(resource.prlimit(pid, resource.RLIMIT_FSIZE)[0] == 0 for pid in validators))
    os.kill(validators[0], signal.SIGSTOP)
    with concurrent_requests(server, _LONG) as answers:
        assert server.wait_for(lambda: answers[0].n_events > 2)
        assert _die_with_killed_service(server, pids, 3)


def test_kernel_build_dies_with_a_killed_service(
    serve: Services, tmp_path: Path, stub_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = fake_compiler(tmp_path, stub_library, before="while true; do sleep 0.1; done")
    monkeypatch.setenv("CXX", str(slow.path))
    server = serve("--kernels", "native", "--cache-dir", str(tmp_path / "cache"), wait=False)
    assert server.wait_for(lambda: bool(slow.pids)), server.log.read_text()
    assert _die_with_killed_service(server, [*children(server), *slow.pids])
