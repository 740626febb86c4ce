"""Runs ended by a fault, a full disk or a signal: good weights are kept, no others are saved, one line reports it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.cli.check import main as check
from model.checkpoint.config_file import load_config
from model.files import RESUME_FILE, STATE_FOLDER, CheckpointError, unfinished_run
from model.train.loop import Loop
from model.train.step.trainer import Trainer
from model.train.training_checkpoint import load_snapshot, newest_snapshot
from tests.support import ROOT
from tests.support.disk_faults import SPACE, Operations, intercept_writes, no_space
from tests.support.model.training_runs import (
    EXACT,
    TINY,
    at_micro_batch,
    is_identical,
    signal_after,
    state_of,
    train,
    train_until,
    weights_of,
)

pytestmark = pytest.mark.slow


def _nan(loss: Tensor) -> Tensor:
    return loss * float("nan")


def _bad_gradient(loss: Tensor) -> None:
    loss.register_hook(lambda gradient: gradient * float("inf"))


def test_fault_exits_with_3_and_names_the_previous_snapshot(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*TINY, *EXACT, "--steps", "5", "--save-seconds", "0.0001"]
    train_until(2, text, tmp_path / "two", *flags)
    for fault in (_nan, _bad_gradient):
        out = tmp_path / fault.__name__
        capsys.readouterr()
        with monkeypatch.context() as patch:
            at_micro_batch(3, patch, fault)
            assert train(text, out, *flags) == 3
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "in step 3" in error
        assert f"the last good snapshot is {out}/.training/step-00000002" in error
        assert "--lr" in error and "--matrix-lr" in error and "--warm-up" in error
        step, tensors = state_of(out)
        assert step == 2 and is_identical(tensors, state_of(tmp_path / "two")[1])
        assert not (out / "model.safetensors").exists()
    assert train(text, out, *flags, "--resume") == 0


def test_weights_damaged_by_an_update_are_not_saved(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, update = tmp_path / "out", Trainer.update

    def spoil(learner: Trainer, step: int, lr_factor: float) -> None:
        update(learner, step, lr_factor)
        if step == 1:
            with torch.no_grad():
                learner.decoder.embedding[7, 3] = float("nan")  # a token that occurs in no text

    monkeypatch.setattr(Trainer, "update", spoil)
    assert train(text, out, *TINY, "--steps", "5", "--save-seconds", "0.0001") == 3
    assert "step-00000001" in capsys.readouterr().err
    assert state_of(out)[0] == 1


def test_result_without_a_finite_loss_is_not_written(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "bits_per_byte_of", lambda *_: float("nan"))
    assert train(text, tmp_path / "out", *TINY, "--steps", "1") == 3
    assert "held-out loss became nan" in capsys.readouterr().err
    assert not (tmp_path / "out/model.safetensors").exists()


def _full(*_: object, **__: object) -> None:
    raise CheckpointError("cannot be written (No space left on device)")


def test_run_continues_with_a_warning_if_snapshots_do_not_fit(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.train.loop.save_snapshot", _full)
    out = tmp_path / "out"
    assert train(text, out, *TINY, "--steps", "3", "--save-seconds", "0.0001") == 0
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 4 and warnings[0].startswith("warning: no snapshot of step 1, there is none yet: ")
    assert warnings[-1].endswith("No space left on device); training continues")
    assert load_config(out).width == 32


def test_signal_without_space_for_a_snapshot_names_the_last_one(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, flags = tmp_path / "out", [*TINY, *EXACT, "--steps", "4"]
    train_until(2, text, out, *flags)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("model.train.loop.save_snapshot", _full)
        signal_after(3, patch)
        assert train(text, out, *flags, "--resume") == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert f"no snapshot of step 3, {out}/.training/step-00000002 remains the latest" in errors[0]
    assert train(text, out, *flags, "--resume") == 0
    assert state_of(out)[0] == 4


def test_closed_output_does_not_end_a_run(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `| head` or a log on a full disk. The interpreter flushes its output once more at its end."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as unread, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", unread)
        assert train(text, tmp_path / "out", *TINY, "--steps", "2", "--report-seconds", "0.001") == 0
    assert capsys.readouterr().err == ""
    assert load_config(tmp_path / "out").width == 32


def test_disk_full_at_any_operation_gives_a_result_or_one_line(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, counting = [*TINY, "--steps", "2", "--save-seconds", "0.0001"], Operations()
    with intercept_writes(counting):
        assert train(text, tmp_path / "dry", *flags) == 0
    needing = [number for number, what in enumerate(counting.seen) if what != "rmtree"]
    for share in (0.2, 0.4, 0.8):
        out = tmp_path / str(share)
        capsys.readouterr()
        with intercept_writes(Operations(no_space, needing[int(share * len(needing))], SPACE)):
            code = train(text, out, *flags)
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert (code, len(errors)) in ((0, 0), (2, 1))
        assert newest_snapshot(out / ".training") is None or load_snapshot(out / ".training")
        assert train(text, out, *flags, "--resume") == 0


@contextmanager
def _default_signal_handlers() -> Iterator[None]:
    """A background test run ignores SIGINT, and one under nohup ignores SIGHUP."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in zip((signal.SIGINT, signal.SIGHUP), before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("one_thread")  # with two, the next micro-batch would run at the same time
def test_signal_during_accumulation_saves_the_last_full_step(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 4 micro-batches per step, the third one of step 3 is the last that is computed."""
    flags = [*TINY, *EXACT, "--micro-windows", "1", "--steps", "5"]
    train_until(2, text, tmp_path / "two", *flags)
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        out, computed = tmp_path / number.name, list[Tensor]()
        with monkeypatch.context() as patch, _default_signal_handlers():
            at_micro_batch(11, patch, lambda _loss, number=number: signal.raise_signal(number))
            at_micro_batch(12, patch, computed.append)
            assert train(text, out, *flags) == code
        assert not computed
        step, tensors = state_of(out)
        assert step == 2 and is_identical(tensors, state_of(tmp_path / "two")[1])
    assert train(text, tmp_path / "whole", *flags) == 0
    assert train(text, out, *flags, "--resume") == 0
    assert is_identical(weights_of(out), weights_of(tmp_path / "whole"))


def test_signal_during_the_final_measurement_loses_nothing(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, flags, measure = tmp_path / "out", [*TINY, *EXACT, "--steps", "3"], Loop.bits_per_byte_of
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "bits_per_byte_of", lambda *run: (signal.raise_signal(signal.SIGTERM), measure(*run))[1])
        assert train(text, out, *flags) == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert state_of(out)[0] == 3 and unfinished_run(out)
    assert train(text, out, *flags, "--resume") == 0
    assert (out / "model.safetensors").exists() and not unfinished_run(out)


def test_interrupted_run_can_be_served_and_check_names_the_resume_command(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of 50 steps is measured after 3: a signal after 2 leaves the last weights, one after 4 the best."""
    out, flags = tmp_path / "out", [*TINY, *EXACT, "--steps", "50"]
    train_until(2, text, out, *flags, "--overwrite")
    error, (_, state) = capsys.readouterr().err, state_of(out)
    resume, serve = error.splitlines()[-1], f"-m app serve --weights {out}"
    assert f"{out} can be served (weights after the last step): " in error and serve in error
    assert resume.endswith("--resume") and "--overwrite" not in resume
    assert "not measured yet" in (out / "README.md").read_text()
    assert torch.equal(weights_of(out)["model.embed_tokens.weight"], state["decoder.embedding"])
    assert check([str(out)]) == 0
    assert f"unfinished: --resume continues it: {resume}" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        signal_after(4, patch)
        patch.setattr(Loop, "bits_per_byte", lambda *_: 2.5)
        assert train(text, out, *flags, "--resume") == 143
    assert "weights after step 3 of 4, the fewest held-out bits" in capsys.readouterr().err
    assert "**2.5000**" in (out / "README.md").read_text()
    assert torch.equal(weights_of(out)["model.embed_tokens.weight"], state_of(out)[1]["best.embedding"])
    monkeypatch.chdir(tmp_path)
    command = unfinished_run(out)
    assert command and command.startswith(f"cd {shlex.quote(str(ROOT))} && ")


def test_resume_command_quotes_spaces(tmp_path: Path) -> None:
    (tmp_path / STATE_FOLDER).mkdir()
    note = {"command": "inkstream train --resume", "folder": "/my books"}
    (tmp_path / STATE_FOLDER / RESUME_FILE).write_text(json.dumps(note))
    assert unfinished_run(tmp_path) == "cd '/my books' && inkstream train --resume"


def test_interrupted_run_without_space_for_its_model_warns_and_can_resume(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, flags = tmp_path / "out", [*TINY, "--steps", "50"]
    with monkeypatch.context() as patch:
        patch.setattr("model.train.run.write_files", _full)
        train_until(2, text, out, *flags)
    error = capsys.readouterr().err
    assert "warning: no model was exported (cannot be written (No space left on device))" in error
    assert "everything is saved" in error and state_of(out)[0] == 2
    assert check([str(out)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "unfinished training run without a model yet; continue: " in message
    assert message.rstrip().endswith("--resume")


def test_a_second_signal_ends_at_once() -> None:
    program = (
        "import signal, sys\n"
        "from model.train.interrupts import StopRequest\n"
        "with StopRequest().handle_signals():\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('alive', flush=True)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('still alive', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("alive\n", -signal.SIGTERM)
    assert "exit immediately" in done.stderr
