"""The flags of training: defaults, help, and common mistakes, each reported in one line without leaving files."""

from __future__ import annotations

import ast
import fcntl
import gzip
import os
import re
import shlex
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from model.train.__main__ import main
from model.train.data.sources import DataError, Sources
from model.train.options import parse, parser
from tests.support import ROOT
from tests.support.model.tiny_models import TEXT, tiny_weights

SHAPE = ["--preset", "nano", "--vocab-size", "300", "--context", "32", "--windows", "2", "--device", "cpu"]
RUN = ["--data", "text.txt", *SHAPE, "--steps", "1"]


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
        ("--init w", TUNING),  # the learning rate follows from the width
        ("--init w --steps 9 --lr 0.1", TUNING | {"steps": 9, "epochs": None, "lr": 0.1}),
    ],
)
def test_defaults_come_from_the_flag_the_preset_or_the_initial_weights(flags: str, expected: dict[str, object]) -> None:
    options = vars(parse(["--data", "x", "--out", "y", *flags.split()]))
    assert {name: options[name] for name in expected} == expected


def test_help_fits_into_80_columns_and_states_every_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printed = parser().format_help()
    assert max(map(len, printed.splitlines())) <= 80 and len(printed.splitlines()) < 140
    without = {
        "out",
        "data",
        "pairs",
        "unseen",
        "init",
        "max_minutes",
        "tokens",
        "about",
        "license",
        "language",
        "help",
    }
    for action in parser()._actions:
        assert action.help and (action.dest in without or action.nargs == 0 or "default" in action.help), action.dest


def test_every_flag_is_used_and_the_readme_names_only_existing_flags() -> None:
    read: set[str] = set()
    for path in sorted((ROOT / "model/train").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] in ("options", "asked"):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)  # getattr(options, name)
    actions = parser()._actions
    assert {action.dest for action in actions} - {"help"} <= read
    section = (ROOT / "README.md").read_text().partition("## Train your own")[2].partition("\n## ")[0]
    named = set(re.findall(r"--[a-z][a-z-]+", section))
    assert {"--resume", "--preset"} <= named <= {name for action in actions for name in action.option_strings}


def _text(content: bytes) -> dict[str, bytes]:
    return {"text.txt": content}


def _input(content: str) -> dict[str, bytes]:
    return {"in.tsv": content.encode()}


CROSS, TOY_LINES = "--preset cross --tokenizer words --context 16", "--preset toy --context 16"
GOOD = _text(TEXT.encode())
ERRORS: list[tuple[dict[str, bytes], str, str]] = [
    # errors of argparse
    (GOOD, "--step 2", "unrecognized arguments: --step 2"),
    (GOOD, "--steps 3.5", "--steps: '3.5' is not a whole number of at least 1"),
    (GOOD, "--context 0", "--context: '0' is not a whole number"),
    (GOOD, "--windows 100000000000", "--windows: '100000000000' is not a whole number from 1 to 65536"),
    (GOOD, "--held-out 0.31", "'0.31' is not a number above 0 and up to 0.3"),
    (GOOD, "--held-out 0", "'0' is not a number above 0 and up to 0.3"),
    (GOOD, "--license 'mit\nx: y'", "is not an identifier such as mit"),
    (GOOD, "--name 'a/b'", "'a/b' is not a name of letters, digits, _, . and -, such as plays-5m"),
    (GOOD, "--language 'en\n'", "is not a code such as en or pt-BR"),
    (GOOD, "--data ''", "is empty: name a file or folder"),
    (GOOD, "--preset smal", "unknown preset 'smal', did you mean small? available:"),
    # flags that contradict each other or the preset
    (GOOD, "--resume --overwrite", "--resume cannot be combined with --overwrite"),
    (GOOD, "--optimizer adamw --matrix-lr 0.1", "--matrix-lr needs --optimizer muon"),
    (GOOD, "--init x", "--preset, --vocab-size cannot be combined with --init"),
    (GOOD, "--schedule cosine --warm-down 0.2", "--warm-down needs --schedule linear"),
    (GOOD, "--pairs text.txt --preset cross", "--data cannot be combined with --pairs"),
    (GOOD, "--preset toy --arch gpt", "needs one of the presets nano, small"),
    (GOOD, "--sample-prompt ' '", "--sample-prompt is empty; give the start of a text"),
    (GOOD, "--sample-prompt Once --per-line", "--sample-prompt needs running text"),
    (GOOD, f"--sample-prompt '{'x' * 99}'", "--sample-prompt has"),
    (GOOD, "--width 100 --heads 3", "is not divisible by 3 heads"),
    (GOOD, "--preset small --heads 4 --kv-heads 3", "not divisible by 3 key/value heads"),
    (GOOD, "--preset small --width 12 --heads 4", "must be even"),
    (GOOD, "--width 100000 --layers 99", "of memory"),
    (GOOD, "--per-line --unseen text.txt", "--unseen needs running text"),
    (GOOD, "--per-line --straighten 0.5", "--straighten needs running text"),
    (GOOD, "--per-line --preset auto", "--preset auto needs running text"),
    (GOOD, "--data - --preset auto", "choose a preset"),
    (GOOD, "--text-key body", "--text-key needs .jsonl files"),
    (GOOD, "--end-token 'a b'", "--end-token must be one word"),
    (GOOD, "--end-token The", "also a token of the text"),
    (GOOD, "--vocab-size 9999", "tokens, not 9999: give more text or a smaller"),
    (GOOD, "--vocab-size 256", "--vocab-size must be at least 257"),
    (GOOD, "--context 99999", "give more text or --context "),
    (GOOD, "--context 1", "--context must be at least 2 tokens, not 1"),
    (_text(b"Too short."), "--context 256 --vocab-size 260", "too few for windows of 256"),
    # invalid text
    (GOOD, "--data texd.txt", "texd.txt: no such file or folder"),
    (GOOD, "--data '*.md'", "*.md: no such file or folder"),
    (GOOD, "--data 'a\nb'", r"a\nb: no such file or folder"),
    (GOOD, f"--data {'x' * 5000}", f"{'x' * 200}...: cannot be read (File name too long)"),
    (GOOD, f"--out {'x' * 300}", "cannot be written (File name too long)"),
    (GOOD, "--out text.txt/out --dry-run", "--out text.txt/out: cannot be written (Not a directory)"),
    (GOOD, "--data /dev/zero", "/dev/zero: is a device, not a file; - reads standard input"),
    (_text(b"\n\r\n\n\n"), "", "no text in text.txt"),
    (_text(b"x"), "", "too short to hold out a part"),
    ({"f/a.png": b"x", "f/.git/a.txt": b"x"}, "--data f", "f: no .txt, .text, .md, .markdown, .jsonl, .ndjson file"),
    (_text(TEXT.encode() + b"\0\1"), "", "text.txt, line 41: contains a NUL byte"),
    (_text(b"Good.\ncaf\xe9\n"), "", "line 2: not UTF-8 text (byte 0xe9)"),
    (_text("Hi.".encode("utf-16")), "", "is UTF-16, not UTF-8: iconv -f UTF-16 -t UTF-8 text.txt > text.utf8.txt"),
    ({"a.txt.gz": gzip.compress(b"a" * 99, mtime=0)[:-9]}, "--data .", "cannot be read"),
    ({"a.txt.gz": b"not gzip"}, "--data .", "cannot be read"),
    ({"a.jsonl": b'{"text": "x"}\n{"body": "x", "n": 1}\n'}, "--data .", "a.jsonl, line 2: must be a JSON object"),
    ({"a.jsonl": b"x\n"}, "--data .", "a.jsonl, line 1: must be a JSON object"),
    ({"a.jsonl": b'{"text": "\\ud800"}'}, "--data .", "with a valid Unicode string"),
    ({"a.json.gz": gzip.compress(b"[]", mtime=0)}, "--data a.json.gz", "use a .jsonl with one object per line"),
    # held-out text, output, model card
    (GOOD, "--unseen text.txt", "--unseen text.txt: 1 of its 1 documents are also in --data"),
    (GOOD, "--out text.txt/x", "--out text.txt/x: cannot be written"),
    (GOOD, "--out /proc/x", "--out /proc/x: cannot be written"),
    (GOOD, "--about about.md", "--about about.md: cannot be read"),
]  # fmt: skip
ROWS: list[tuple[str, str, str]] = [
    (f"{CROSS} --pairs", "1 2\t2 1\n1 2 3\n", "line 2: a pair is a source, one tab and a target"),
    (f"{CROSS} --pairs", "1 2\t2 1\t\n", "line 1: a pair is"),
    (f"{CROSS} --pairs", "1 2\t2 1\n \t1\n", "line 2: the source is empty"),
    (f"{CROSS} --pairs", "1 2\t2 1\n" + "1 " * 17 + "\t1\n", "line 2: the source has 17 tokens"),
    (f"{CROSS} --pairs", "1 2\t2 1\n1\t" + "1 " * 15 + "\n", "line 2: the target with its start and end has 17"),
    (f"{CROSS} --per-line --pairs", "1\t1\n", "--per-line needs --data"),
    (f"{CROSS} --data", "1\t1\n", "use --pairs FILE.tsv"),
    ("--preset gpt --pairs", "1\t1\n", "use --data, or --preset cross"),
    (f"{TOY_LINES} --data", "a b\n\n" + "a " * 16 + "\n", "line 3: the line with its end has 17 tokens"),
    (f"{TOY_LINES} --data", "a b\n<EOS>\n", "line 2: there is no text before the end token"),
    (f"{TOY_LINES} --vocab-size 2 --data", "a b\n", "--vocab-size must be at least 3"),
]
KEPT = ("--sample-prompt has", "too few for windows", "give more text or --context", "of memory")
"""Errors after which the tokens stay, for the same command with a number changed."""
CASES = [
    *((files, [*RUN, *shlex.split(flags)], words) for files, flags, words in ERRORS),
    *((_input(text), [*shlex.split(flags), "in.tsv", "--steps", "1"], words) for flags, text, words in ROWS),
    (GOOD, RUN[:-2], "the length of the run is missing: --max-minutes, --epochs, --tokens or --steps"),
    (GOOD, RUN[2:], "the training data is missing: --data PATH"),
]


def _exit_code(*flags: str) -> int:
    try:
        return main([*flags] if "--out" in flags else [*flags, "--out", "out"])
    except SystemExit as ended:  # argparse's message
        return int(ended.code or 0)


@pytest.fixture
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("files", "flags", "words"), CASES, ids=[words[:40] for _, _, words in CASES])
def test_mistake_is_one_line_and_leaves_no_files(
    working_directory: Path, files: dict[str, bytes], flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (working_directory / "text.txt").unlink()
    for name, content in files.items():
        (working_directory / name).parent.mkdir(parents=True, exist_ok=True)
        (working_directory / name).write_bytes(content)
    before = sorted(working_directory.rglob("*"))
    assert _exit_code(*flags) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: ") and words in errors[0], errors
    made = [path for path in sorted(working_directory.rglob("*")) if path not in before]
    assert not made or words.startswith(KEPT), made


@pytest.mark.slow
def test_content_of_an_output_directory_is_neither_shared_nor_lost(
    working_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_weights(working_directory / "out")
    before = (working_directory / "out/model.safetensors").read_bytes()
    assert _exit_code(*RUN) == 2
    assert "--out out: holds a model without a run" in capsys.readouterr().err
    assert (working_directory / "out/model.safetensors").read_bytes() == before
    (working_directory / "out/.training").mkdir(parents=True)
    lock = os.open(working_directory / "out/.training/lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert _exit_code(*RUN, "--overwrite") == 2
    assert "--out out: another run uses it" in capsys.readouterr().err
    os.close(lock)
    assert _exit_code(*RUN, "--overwrite") == 0, "files of a killed run must not lock the directory"
    assert (working_directory / "out/model.safetensors").read_bytes() != before
    assert not (working_directory / "out/.training/lock").exists()


@pytest.mark.slow
def test_full_disk_is_reported_and_leaves_no_files(
    working_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _path: usage(10**9, 10**9 - 10**6, 10**6))
        assert _exit_code(*RUN) == 2
        error = capsys.readouterr().err
        assert "MiB for snapshots and result, its disk has 976.6 KiB free" in error and error.count("\n") == 1
        assert _exit_code(*RUN, "--dry-run") == 2
        assert "not enough disk space" in capsys.readouterr().err
    shutil.rmtree(working_directory / "out")

    def fail(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    assert _exit_code(*RUN) == 2
    assert "cannot be written (No space left on device)" in capsys.readouterr().err
    assert not (working_directory / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("target", "why"), [("nowhere", "No such file"), ("link.txt", "Too many levels")])
def test_an_unreadable_file_in_a_folder_is_named(
    working_directory: Path, target: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (working_directory / "link.txt").symlink_to(target)
    assert _exit_code(*RUN, "--data", ".") == 2
    assert f"link.txt: cannot be read ({why}" in capsys.readouterr().err


def test_image_without_training_packages_reports_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("model.train.__main__.find_spec", lambda _: None)
    assert main(["--data", "x", "--out", "y", "--steps", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: this installation can serve, but not train") and error.count("\n") == 1


@pytest.mark.parametrize(("target", "reason"), [("nowhere", "No such file or directory"), ("a.txt", "Too many levels")])
@pytest.mark.parametrize("name", ["a.txt", "*.txt"])
def test_a_broken_link_is_an_error_that_names_it(name: str, target: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(target)
    with pytest.raises(DataError, match=rf"a\.txt: cannot be read \({reason}"):
        list(Sources([str(tmp_path / name)]).documents())
