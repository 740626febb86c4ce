"""docs/train.md matches the code: its commands run in order, shortened, and its tables are complete."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from app.__main__ import main as inkstream
from model.presets import SIZES
from model.train.setup.options import parse
from tests.support import ROOT
from tests.support.model.tiny_models import TEXT, tiny_weights
from tests.support.model.training_runs import shorten_samples
from tests.support.servers import Server, start_server, stop_server

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/train.md").read_text()
README = (ROOT / "README.md").read_text()
COMMANDS = "".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)).splitlines()
SHORT = ["--context", "32", "--windows", "4", "--device", "cpu", "--report-seconds", "0.001"]
NEW = ["--vocab-size", "300", "--layers", "1", "--width", "32", "--heads", "2"]


class Newcomer:
    """Types what the page says, in a folder of their own, and has no patience: a few steps each time."""

    def __init__(self, folder: Path, *, nightly: bool) -> None:
        self.folder, self.nightly = folder, nightly
        self.weights: Path | None = None
        self.server: Server | None = None
        self.steps = 2

    def types(self, line: str) -> None:
        words = shlex.split(line)
        if words[0] == "make":
            words = _made(words)
        match words[:2]:
            case [".venv/bin/inkstream", "train"]:
                self.train(words[2:])
            case [".venv/bin/inkstream", "serve"]:
                self.weights = self.folder / words[words.index("--weights") + 1]
            case [".venv/bin/inkstream", "complete"]:
                assert inkstream([*words[1:], "--url", self.serve().url]) == 0
            case [".venv/bin/torchrun", _]:
                assert parse(words[words.index("model.train") + 1 :]).out == "mine2"
                if self.nightly:  # three more processes that import torch; test_distributed.py has two in this one
                    self.runs([sys.executable, "-m", "torch.distributed.run", *words[1:], *SHORT, *NEW, "--steps", "2"])
            case _:
                self.runs(["bash", "-c", line])

    def train(self, flags: list[str]) -> None:
        out = flags[flags.index("--out") + 1]
        if "--dry-run" in flags:
            assert inkstream(["train", *flags, "--device", "cpu"]) == 0
            assert not (self.folder / out).exists()
            return
        if "--resume" in flags:
            self.steps += 1
        elif (self.folder / out).exists():
            shutil.rmtree(self.folder / out)
        shape = [] if "--init" in flags else NEW
        assert inkstream(["train", *flags, *shape, *SHORT, "--steps", str(self.steps)]) == 0

    def serve(self) -> Server:
        """The server the page started last; starting takes seconds, so it starts on first use."""
        assert self.weights, "nothing is served"
        self.server = self.server or start_server(self.folder, self.weights)
        return self.server

    def runs(self, command: list[str]) -> None:
        variables = {**os.environ, "HOME": str(self.folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=self.folder, env=variables, check=True, capture_output=True, timeout=120)

    def close(self) -> None:
        if self.server:
            assert stop_server(self.server) == 0
            self.server = None


def _made(words: list[str]) -> list[str]:
    """What make would run in the end."""
    printed = subprocess.run(
        [words[0], "--no-print-directory", "--dry-run", *words[1:]],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    made = shlex.split(printed.splitlines()[-1].replace("exec ", ""))
    assert made[:2] == [".venv/bin/python", "-m"]
    return [".venv/bin/inkstream", *({"model.train": ["train"], "app": []}[made[2]]), *made[3:]]


def test_the_commands_of_the_page_work_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nightly: bool
) -> None:
    (tmp_path / "my-writing").mkdir()
    for folder in ("my-writing", "texts"):  # the first two commands stand before "get text in"
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "diary.txt").write_text(TEXT * 3)
    words = TEXT.split()
    (tmp_path / "poems.txt").write_text("\n".join(f"{a} {b}" for a, b in pairwise(words)))
    (tmp_path / "translations.tsv").write_text("".join(f"{a} {b}\t{b} {a}\n" for a, b in pairwise(words)))
    (tmp_path / "statquest.txt").write_text("what is statquest <EOS> awesome <EOS>\n" * 2)
    tiny_weights(tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    shorten_samples(monkeypatch)
    newcomer = Newcomer(tmp_path, nightly=nightly)
    for line in COMMANDS:
        newcomer.types(line)
    newcomer.close()
    printed = capsys.readouterr().out
    assert "serve it: " in printed and "step 0: held-out bits per byte" in printed
    table = PAGE[PAGE.index("| file in `mine/` |") : PAGE.index("**Bits per byte**")]
    named = {name for row in table.strip().splitlines()[2:] for name in re.findall(r"`([\w./]+)`", row.split("|")[1])}
    assert named == {path.name + "/" * path.is_dir() for path in (tmp_path / "mine").iterdir()}
    for name in ("tuned", "lines", "pairs", "toy", *["mine2"] * nightly):
        assert (tmp_path / name / "model.safetensors").exists()


def test_the_sizes_are_those_of_the_table_in_the_readme() -> None:
    for name in SIZES:
        (size,) = re.findall(rf"^\| `{name}` \| ([\d.]+ M), ", PAGE, re.MULTILINE)
        assert re.search(rf"^\| `{name}` \|.*\| {size} \|", README, re.MULTILINE), name
