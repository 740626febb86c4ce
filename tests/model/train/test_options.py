"""The flags of training: grouped, every one with its sentence and its default, readable in a terminal of 80 columns."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys

import pytest

from model.command_line import language, license_id, positive_int, small_fraction
from model.train.setup.options import parse, parser
from tests.support import ROOT

NO_DEFAULT = {"out", "data", "pairs", "unseen", "init", "max_minutes", "tokens", "about", "license", "language", "help"}


def test_every_flag_has_its_sentence_and_tells_its_default() -> None:
    for action in parser()._actions:
        assert action.help, action.option_strings
        if action.dest not in NO_DEFAULT and action.nargs != 0:
            assert "default" in action.help, action.option_strings


def test_a_default_is_the_flag_s_the_preset_s_or_that_of_weights_to_go_on_from() -> None:
    def of(*flags: str) -> argparse.Namespace:
        return parse(["--data", "x", "--out", "y", *flags])

    assert (of().windows, of("--preset", "cross").windows, of("--init", "w").windows) == (16, 64, 8)
    assert (of().steps, of("--preset", "toy").steps, of("--preset", "toy", "--epochs", "2").steps) == (None, 400, None)
    assert (of("--init", "w").epochs, of("--init", "w", "--steps", "1").epochs) == (3.0, None)
    assert (of().lr, of("--optimizer", "adamw").lr, of("--preset", "toy").lr, of("--init", "w").lr) == (
        0.004,
        0.001,
        0.1,
        None,
    )
    assert of("--preset", "toy", "--optimizer", "muon").lr == 0.004


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
    ("kind", "good", "bad"), [(positive_int, "3", "0"), (positive_int, "3", "3.5"), (small_fraction, "0.3", "0.31")]
)
def test_numbers_out_of_range_are_refused(kind: object, good: str, bad: str) -> None:
    assert callable(kind)
    assert kind(good) == float(good)
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(repr(bad))):
        kind(bad)


@pytest.mark.parametrize("wrong", ["MIT License", "", "Apache-2.0", "mit\nx: y"])
def test_a_license_is_an_identifier(wrong: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not an identifier such as mit"):
        license_id(wrong)


@pytest.mark.parametrize("wrong", ["English", "", "EN", "en\n"])
def test_a_language_is_a_code(wrong: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a code such as en or pt-BR"):
        language(wrong)


@pytest.mark.parametrize("wrong", ["smal", "Base", "mediun", "autoo"])
def test_a_preset_written_wrong_is_told_with_the_one_that_was_meant(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--out", "x", "--preset", wrong])
    assert ended.value.code == 2
    meant = {"smal": "small", "Base": "base", "mediun": "medium", "autoo": "auto"}[wrong]
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_the_readme_names_only_flags_that_there_are() -> None:
    flags = {name for action in parser()._actions for name in action.option_strings}
    section = (ROOT / "README.md").read_text().partition("## Train your own")[2].partition("\n## ")[0]
    named = set(re.findall(r"--[a-z][a-z-]+", section))
    assert {"--resume", "--preset"} <= named <= flags


def test_as_many_windows_as_no_memory_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--out", "x", "--data", "y", "--windows", "100000000000"])
    assert ended.value.code == 2
    assert "--windows: '100000000000' is not a whole number from 1 to 65536" in capsys.readouterr().err


def test_flags_are_read_before_torch_is_imported() -> None:
    program = "import sys, model.train.setup.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("flag", ["--out", "--data", "--pairs", "--unseen", "--init", "--about"])
def test_an_empty_path_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A variable that is not set: the model went into the working directory, or --init was ignored silently."""
    with pytest.raises(SystemExit) as caught:
        parse(["--data", "x", "--out", "y", "--steps", "1", flag, ""])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: argument {flag}: is empty: name a file or folder")


def test_a_vocabulary_that_no_memory_holds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """tokenizers ended the process with SIGABRT and its stack."""
    with pytest.raises(SystemExit) as caught:
        parse(["--data", "x", "--out", "y", "--steps", "1", "--vocab-size", "999999999"])
    assert caught.value.code == 2
    assert "'999999999' is not a whole number from 1 to 1048576" in capsys.readouterr().err
