"""A resumed run has the same numbers bit for bit, its own flags and data, and uses the newest complete snapshot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from model.train.__main__ import main
from model.train.training_checkpoint import Position, load_snapshot, save_snapshot
from tests.support.model.tiny_models import TEXT
from tests.support.model.training_runs import (
    EXACT,
    SMALL,
    TINY,
    is_identical,
    signal_after,
    state_of,
    train,
    train_until,
    weights_of,
)

pytestmark = pytest.mark.slow

LINES = "".join(f"the {a} saw the {b}\n" for a in "abcd" for b in "vwxyz")
PAIRS = "".join(f"{a} {b}\t{b} {a}\n" for a in range(5) for b in range(5))
WORDS = ["--tokenizer", "words"]
FORMS = {
    "windows, muon": (["--optimizer", "muon"], ""),
    "windows, adamw, cosine, average": (["--optimizer", "adamw", "--schedule", "cosine", "--ema", "0.9"], ""),
    "lines": ([*WORDS, "--per-line"], LINES),
    "pairs": ([*WORDS, "--preset", "cross", "--pairs"], PAIRS),
}


@pytest.mark.parametrize("form", FORMS)
def test_ten_steps_resumed_for_ten_more_equal_twenty_bit_for_bit(tmp_path: Path, text: Path, form: str) -> None:
    """Weights, optimizer, average, best weights and position."""
    flags, content = FORMS[form]
    if content:
        text.write_text(content)
    data = [str(text)] if flags[-1] == "--pairs" else ["--data", str(text)]
    command = [*SMALL, *TINY, *EXACT, "--steps", "20", "--warm-up", "5", *flags, *data, "--out"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    with pytest.MonkeyPatch.context() as patch:
        signal_after(10, patch)
        assert main([*command, str(tmp_path / "halves")]) == 143
    assert "the run is unfinished" in (tmp_path / "halves/README.md").read_text()
    assert main([*command, str(tmp_path / "halves"), "--resume"]) == 0
    whole, halves = (load_snapshot(tmp_path / name / ".training") for name in ("whole", "halves"))
    assert whole and halves and is_identical(whole[1], halves[1])
    assert {owner.partition(".")[0] for owner in whole[1]} >= {"decoder", "adamw", "best"}
    a, b = (json.loads(found[0].as_json()) | {"seconds": 0} for found in (whole, halves))
    assert a == b and a["step"] == 20 and a["best_step"] > 0
    assert is_identical(weights_of(tmp_path / "whole"), weights_of(tmp_path / "halves"))
    for name in ("samples.md", "generation_config.json", "golden.json"):
        assert (tmp_path / "halves" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert _losses(tmp_path / "halves") == _losses(tmp_path / "whole")


def _losses(out: Path) -> list[tuple[object, ...]]:
    records = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [tuple(record.get(key) for key in ("step", "tokens", "loss", "held_out", "grad_norm")) for record in records]


def test_existing_run_is_neither_lost_nor_resumed_by_accident(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    train_until(2, text, out, *TINY, "--steps", "4", "--resume")
    assert "note: there is no snapshot to resume from; the run starts over" in capsys.readouterr().out
    assert train(text, out, *TINY, "--steps", "4") == 2
    assert "--resume" in capsys.readouterr().err
    assert train(text, out, *TINY, "--steps", "4", "--resume", "--context", "16") == 2
    assert "has another shape (context 32, not 16); pass the same or --overwrite" in capsys.readouterr().err
    text.write_text(TEXT * 4)
    assert train(text, out, *TINY, "--steps", "4", "--resume") == 2
    assert "other data" in capsys.readouterr().err
    train_until(1, text, out, *TINY, "--steps", "4", "--overwrite")
    assert state_of(out)[0] == 1


def test_run_resumes_only_with_its_original_flags(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*TINY, "--steps", "2", "--dtype", "float32", "--lr", "0.003"]
    out = tmp_path / "out"
    train_until(1, text, out, *flags)
    others = ["--seed 2", "--windows 5", "--matrix-lr 0.1", "--lr 0.1", "--weight-decay 0.1", "--dtype bfloat16"]
    for other in [*others, "--optimizer adamw", "--lr 0.1 --seed 3"]:
        capsys.readouterr()
        assert train(text, out, *flags, *other.split(), "--resume") == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        named = [word for word in error.split() if word.startswith("--")]
        assert sorted(named) == sorted([*other.split()[::2], "--overwrite"])
    assert " had --seed 1 --lr 0.003; pass the same" in error
    assert train(text, out, *flags, "--resume") == 0


def test_run_may_be_extended_and_differs_by_rounding_only(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, flags = tmp_path / "out", [*TINY, *EXACT]
    assert train(text, out, "--steps", "2", *flags) == 0
    assert "note:" not in capsys.readouterr().out
    assert train(text, out, "--steps", "4", *flags, "--micro-windows", "1", "--resume") == 0
    printed = capsys.readouterr().out
    assert "note: the run had --steps 2; it ends with --steps 4 now, and its schedule follows" in printed
    assert "note: the run had --micro-windows auto: it goes on the same up to rounding, not bit for bit" in printed
    assert state_of(out)[0] == 4


def test_newest_readable_snapshot_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def save(step: int) -> None:
        save_snapshot(tmp_path, Position(step=step, seconds=1.0, digest="d", shape="s", flags={}), {"x": torch.ones(1)})

    save(1)
    older = (tmp_path / "step-00000001").rename(tmp_path / "kept")
    save(2)
    older.rename(tmp_path / "step-00000001")
    (tmp_path / "step-00000002/state.safetensors").write_bytes(b"torn")
    (tmp_path / ".step-00000003").mkdir()
    found = load_snapshot(tmp_path)
    assert found and found[0].step == 1
    assert "damaged" in capsys.readouterr().out
    save(2)
    found = load_snapshot(tmp_path)
    assert found and found[0].step == 2, "a good snapshot of the same step must replace a damaged one"


@pytest.mark.parametrize("content", ["[]", "7", '{"format": 2, "steps": 1}', "{"])
def test_damaged_position_is_skipped(tmp_path: Path, content: str) -> None:
    save_snapshot(tmp_path, Position(step=1, seconds=1.0, digest="d", shape="s", flags={}), {"x": torch.ones(1)})
    (tmp_path / "step-00000001/position.json").write_text(content)
    assert load_snapshot(tmp_path) is None


def test_snapshot_of_another_version_is_reported(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    train_until(2, text, out, "--steps", "4", *TINY)
    path = out / ".training/step-00000002/position.json"
    position = json.loads(path.read_text())
    for number in (99, 1):
        path.write_text(json.dumps(position | {"format": number}))
        capsys.readouterr()
        assert train(text, out, "--steps", "4", *TINY, "--resume") == 2
        error = capsys.readouterr().err
        assert f"has format {number}" in error and "--overwrite" in error and error.count("\n") == 1
