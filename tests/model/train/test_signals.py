"""Ctrl+C, SIGTERM and SIGHUP: the first saves at once, a second one ends, without tracebacks."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import Tensor

from model.train.data.batch import Batch
from model.train.loop import Loop
from model.train.training_checkpoint import load_snapshot
from tests.support import ROOT
from tests.support.model.training_runs import (
    EXACT,
    SMALL,
    TINY,
    at_micro_batch,
    same,
    state_of,
    train,
    train_until,
    weights_of,
)

pytestmark = pytest.mark.slow


@contextmanager
def _ctrl_c_counts() -> Iterator[None]:
    """A suite that was started in the background ignores it, and one under nohup a closed terminal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in zip((signal.SIGINT, signal.SIGHUP), before, strict=True):
        signal.signal(number, handler)


def test_a_signal_saves_and_names_the_command_that_goes_on(tmp_path: Path, text: Path) -> None:
    command = [sys.executable, "-m", "model.train", "--data", str(text), "--out", str(tmp_path / "out"), *SMALL]
    flags = ["--max-minutes", "5", "--report-seconds", "0.1", "--overwrite"]
    process = subprocess.Popen([*command, *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    while "loss" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert errors.rstrip().endswith("--resume")
    assert "--overwrite" not in errors
    found = load_snapshot(tmp_path / "out/.training")
    assert found and found[0].step > 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_within_an_accumulation_saves_the_last_whole_step(
    tmp_path: Path, text: Path, number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4 micro-batches a step: the third one of step 3 is the last that is computed."""
    flags, computed = [*TINY, *EXACT, "--micro-windows", "1", "--steps", "5"], []
    train_until(2, text, tmp_path / "two", *flags)
    assert train(text, tmp_path / "whole", *flags) == 0

    def interrupt(_loss: Tensor) -> None:
        signal.raise_signal(number)

    with monkeypatch.context() as patch, _ctrl_c_counts():
        at_micro_batch(11, patch, interrupt)
        at_micro_batch(12, patch, computed.append)
        assert train(text, tmp_path / "out", *flags) == code
    assert not computed
    step, tensors = state_of(tmp_path / "out")
    assert step == 2 and same(tensors, state_of(tmp_path / "two")[1])
    assert train(text, tmp_path / "out", *flags, "--resume") == 0
    assert same(weights_of(tmp_path / "out"), weights_of(tmp_path / "whole"))


def test_a_signal_while_the_result_is_measured_loses_nothing(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, flags, measure = tmp_path / "out", [*TINY, *EXACT, "--steps", "3"], Loop.bits_per_byte_of

    def interrupt(loop: Loop, batches: Iterable[Batch]) -> float:
        signal.raise_signal(signal.SIGTERM)
        return measure(loop, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "bits_per_byte_of", interrupt)
        assert train(text, out, *flags) == 143
    assert state_of(out)[0] == 3 and not (out / "model.safetensors").exists()
    assert train(text, out, *flags, "--resume") == 0
    assert (out / "model.safetensors").exists()


def test_signals_are_as_they_were_after_a_run(tmp_path: Path, text: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train_until(1, text, tmp_path / "out", *TINY, "--steps", "2")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_signal_ends_at_once() -> None:
    program = (
        "import signal, sys\n"
        "from model.train.common.console import StopRequest\n"
        "with StopRequest().handle_signals():\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('alive', flush=True)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('still alive', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("alive\n", -signal.SIGTERM)
    assert "exit immediately" in done.stderr


def test_ctrl_c_while_torch_is_imported_is_quiet(tmp_path: Path) -> None:
    """A stand-in for torch, in the middle of whose import it comes."""
    (tmp_path / "torch").mkdir()
    interrupt = "import signal; signal.raise_signal(signal.SIGINT); print('was not heard')"
    (tmp_path / "torch/__init__.py").write_text(interrupt)
    program = (
        "import runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "sys.argv = ['model.train', '--data', 'x', '--out', 'y', '--steps', '1']\n"
        "runpy.run_module('model.train', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 130)
