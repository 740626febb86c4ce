"""docs/train.md matches the code: its commands run in order, shortened, and its tables are complete."""

from __future__ import annotations

import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from model.train.options import parse
from tests.support import ROOT
from tests.support.docs_commands import NEW, SHORT, PageReader, commands
from tests.support.model.tiny_models import TEXT, tiny_weights
from tests.support.model.training_runs import shorten_samples

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/train.md").read_text()


class TrainingPageReader(PageReader):
    """Skips processes that import torch, except in nightly runs."""

    nightly = False

    def run_command(self, command: str) -> str:
        words = shlex.split(command)
        if words[0] != ".venv/bin/torchrun":
            return super().run_command(command)
        assert parse(words[words.index("model.train") + 1 :]).out == "mine2"
        if not self.nightly:  # test_distributed.py forks two processes from one
            return ""
        return self.output([sys.executable, "-m", "torch.distributed.run", *words[1:], *SHORT, *NEW, "--steps", "2"])


def test_commands_of_the_page_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nightly: bool
) -> None:
    (tmp_path / "my-writing").mkdir()
    for folder in ("my-writing", "texts"):  # the first two commands come before "get text in"
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "diary.txt").write_text(TEXT * 3)
    words = TEXT.split()
    (tmp_path / "poems.txt").write_text("\n".join(f"{a} {b}" for a, b in pairwise(words)))
    (tmp_path / "translations.tsv").write_text("".join(f"{a} {b}\t{b} {a}\n" for a, b in pairwise(words)))
    (tmp_path / "statquest.txt").write_text("what is statquest <EOS> awesome <EOS>\n" * 2)
    tiny_weights(tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    shorten_samples(monkeypatch)
    reader = TrainingPageReader(tmp_path, tmp_path / "weights")
    reader.nightly = nightly
    for command in commands(PAGE):
        reader.run_command(command)
    reader.close()
    printed = capsys.readouterr().out
    assert "serve it: " in printed and "step 0: held-out bits per byte" in printed
    table = PAGE[PAGE.index("| file in `mine/` |") : PAGE.index("**Bits per byte**")]
    named = {name for row in table.strip().splitlines()[2:] for name in re.findall(r"`([\w./]+)`", row.split("|")[1])}
    assert named == {path.name + "/" * path.is_dir() for path in (tmp_path / "mine").iterdir()}
    for name in ("tuned", "lines", "pairs", "toy", *["mine2"] * nightly):
        assert (tmp_path / name / "model.safetensors").exists()
