"""The flags of training: grouped, every one with its sentence and its default, readable in a terminal of 80 columns."""

from __future__ import annotations

import ast
import re

import pytest

from model.train.setup.options import parse, parser
from tests.support import ROOT

NO_DEFAULT = {"out", "data", "pairs", "unseen", "init", "max_minutes", "tokens", "about", "license", "language", "help"}


def test_every_flag_has_its_sentence_and_tells_its_default() -> None:
    for action in parser()._actions:
        assert action.help, action.option_strings
        if action.dest not in NO_DEFAULT and action.nargs != 0:
            assert "default" in action.help, action.option_strings


DEFAULTS = {"optimizer": "muon", "lr": 0.004, "tokenizer": "bpe", "per_line": False, "steps": None, "windows": 16}
TOY = {"optimizer": "adamw", "lr": 0.1, "tokenizer": "words", "per_line": True, "steps": 400, "windows": 2}
TUNING = {"optimizer": "adamw", "windows": 8, "warm_up": 10, "epochs": 3.0, "lr": None}
OTHER = "--preset toy --optimizer muon --tokenizer bpe --no-per-line --epochs 3 --windows 5"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", DEFAULTS),
        ("--optimizer adamw", DEFAULTS | {"optimizer": "adamw", "lr": 0.001}),
        ("--preset toy", TOY),
        (OTHER, DEFAULTS | {"windows": 5, "epochs": 3.0}),
        ("--preset toy --lr 0.5 --steps 7", TOY | {"lr": 0.5, "steps": 7}),
        ("--preset cross", {"windows": 64}),
        ("--init w", TUNING),  # the rate follows from the width
        ("--init w --steps 9 --lr 0.1", TUNING | {"steps": 9, "epochs": None, "lr": 0.1}),
    ],
)
def test_a_default_is_the_flags_the_presets_or_that_of_weights_to_go_on_from(
    flags: str, expected: dict[str, object]
) -> None:
    options = vars(parse(["--data", "x", "--out", "y", *flags.split()]))
    assert {name: options[name] for name in expected} == expected


def test_the_help_is_grouped_and_fits_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printed = parser().format_help()
    assert max(map(len, printed.splitlines())) <= 80
    assert len(re.findall(r"^\w.*:$", printed, re.MULTILINE)) == 7
    assert len(printed.splitlines()) < 140


def test_every_option_that_the_code_reads_is_a_flag_or_of_the_recipe() -> None:
    """And the code reads every flag."""
    read: set[str] = set()
    for path in sorted((ROOT / "model/train").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                read |= {node.attr} if owner in ("options", "asked") else set()
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)  # getattr(options, name)
    flags = {action.dest for action in parser()._actions} - {"help"}
    assert flags <= read, flags - read


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        *[(["--steps", wrong], f"--steps: {wrong!r} is not a whole number of at least 1") for wrong in ("0", "3.5")],
        (["--held-out", "0.31"], "--held-out: '0.31' is not a number above 0 and up to 0.3"),
        (["--windows", "100000000000"], "--windows: '100000000000' is not a whole number from 1 to 65536"),
        *[
            (["--license", wrong], "is not an identifier such as mit")
            for wrong in ("MIT License", "", "Apache-2.0", "mit\nx: y")
        ],
        *[(["--language", wrong], "is not a code such as en or pt-BR") for wrong in ("English", "", "EN", "en\n")],
        *[
            (["--preset", wrong], f"did you mean {meant}?")
            for wrong, meant in {"smal": "small", "Base": "base", "mediun": "medium", "autoo": "auto"}.items()
        ],
        (["--resume", "--overwrite"], "--resume cannot be combined with --overwrite"),
        (["--optimizer", "adamw", "--matrix-lr", "0.1"], "--matrix-lr needs --optimizer muon"),
        (["--init", "x", "--preset", "nano"], "--preset cannot be combined with --init"),
        (["--init", "x", "--layers", "3", "--vocab-size", "300"], "--layers, --vocab-size cannot be combined with"),
        (["--init", "x", "--tokenizer", "words"], "--tokenizer cannot be combined with --init"),
    ],
)
def test_a_wrong_flag_is_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--data", "x", "--out", "y", "--steps", "3", "--held-out", "0.3"]).steps == 3
    with pytest.raises(SystemExit, match="2"):
        parse(["--data", "x", "--out", "y", *flags])
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error


def test_the_readme_names_only_flags_that_there_are() -> None:
    flags = {name for action in parser()._actions for name in action.option_strings}
    section = (ROOT / "README.md").read_text().partition("## Train your own")[2].partition("\n## ")[0]
    named = set(re.findall(r"--[a-z][a-z-]+", section))
    assert {"--resume", "--preset"} <= named <= flags
