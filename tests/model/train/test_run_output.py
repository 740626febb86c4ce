"""Output of a whole run: log, curve, samples, card, and its first and last lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from model.train.reporting.metrics_log import read_records
from tests.support.model.training_runs import EXACT, TINY, signal_after, train, train_until

pytestmark = pytest.mark.slow

FLAGS = ["--steps", "12", *EXACT, *TINY]


def _log(out: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "tokens_per_second", "mfu")
    return [
        {k: v for k, v in record.items() if k not in timed} for record in read_records(out / "log.jsonl", start_step=99)
    ]


def test_a_run_leaves_what_a_person_wants_to_see(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    unseen = tmp_path / "unseen_1.txt"
    unseen.write_text("It was never seen that a fox could read what a hen had written. " * 20)
    assert train(text, out, *FLAGS, "--license", "mit", "--unseen", str(unseen)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[:3]] == ["model:", "data:", "plan:"]
    assert "12 steps, 1,536 tokens" in printed[2]
    assert [line.split()[0] for line in printed[-4:]] == ["held-out", "unseen", "written:", "serve"]
    assert [record["step"] for record in _log(out)] == list(range(1, 13))
    assert ElementTree.parse(out / "loss.svg").getroot().tag.endswith("svg")
    page, card = (out / "samples.md").read_text(), (out / "README.md").read_text()
    assert page.count("\n## ") == page.count("**100 %**, step 12:") == 4
    assert "\n## \u201c" in page and '\n## "' in page, "prompts with curly quotes and with straight ones"
    assert card.startswith('---\nlicense: "mit"\n') and r"| never seen: unseen\_1.txt | " in card
    assert str(tmp_path) not in card.partition("Command:")[0]
    generation = json.loads((out / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_p"], generation["repetition_penalty"]) == (0.8, 0.95, 1.05)


def test_a_resumed_run_has_the_log_of_one_without_a_break(tmp_path: Path, text: Path) -> None:
    assert train(text, tmp_path / "whole", *FLAGS) == 0
    train_until(5, text, tmp_path / "halves", *FLAGS)
    assert [record["step"] for record in _log(tmp_path / "halves")] == [1, 2, 3, 4, 5]
    assert ElementTree.parse(tmp_path / "halves/loss.svg"), "there is a picture of a run that was interrupted"
    assert train(text, tmp_path / "halves", *FLAGS, "--resume") == 0
    assert _log(tmp_path / "halves") == _log(tmp_path / "whole")
    for name in ("samples.md", "generation_config.json", "golden.json"):
        assert (tmp_path / "halves" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_samples_in_the_middle_of_a_run_change_nothing_of_it(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling uses its own random generator and leaves no state behind."""
    assert train(text, tmp_path / "without", *FLAGS) == 0
    monkeypatch.setattr("model.train.reporting.samples._FIRST_SECONDS", 0.0)
    monkeypatch.setattr("model.train.reporting.samples._MAX_TIME_SHARE", 1e6)
    assert train(text, tmp_path / "with", *FLAGS, "--ema", "0.9", "--keep", "last") == 0
    stages = [record["step"] for record in read_records(tmp_path / "with/.training/samples.jsonl", start_step=99)]
    assert stages == [1, 3, 6, 12]
    losses = [[record["loss"] for record in _log(tmp_path / name)] for name in ("with", "without")]
    assert losses[0] == losses[1]


def test_a_signal_ends_a_run_without_drawing_first(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.train.reporting.samples._FIRST_SECONDS", 0.0)
    signal_after(1, monkeypatch)
    assert train(text, tmp_path / "out", *FLAGS) == 143
    assert not (tmp_path / "out/samples.md").exists()
