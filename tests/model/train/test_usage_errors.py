"""Common mistakes with python -m model.train: one clear line, exit 2, and no files left behind."""

from __future__ import annotations

import fcntl
import gzip
import os
import shlex
import shutil
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path

import pytest

from model.train.__main__ import main
from tests.support.model.tiny_models import TEXT, tiny_weights

pytestmark = pytest.mark.slow

SHAPE = ["--preset", "nano", "--vocab-size", "300", "--context", "32", "--windows", "2", "--device", "cpu"]
STEPS = ["--steps", "1"]
DATA = ["--data", "text.txt"]
GOOD = {"text.txt": TEXT.encode()}
INCOMPLETE = {"no length": [*DATA, *SHAPE], "no data": [*SHAPE, *STEPS]}
"""Flags instead of those below."""


def _text(content: bytes) -> dict[str, bytes]:
    return {"text.txt": content}


CASES: dict[str, tuple[Mapping[str, bytes], str, str]] = {
    "no length": (GOOD, "", "the length of the run is missing: --max-minutes, --epochs, --tokens or --steps"),
    "no data": (GOOD, "", "the training data is missing: --data PATH"),
    "no such file": (GOOD, "--data texd.txt", "texd.txt: no such file or folder"),
    "empty file": (_text(b""), "", "no text in text.txt"),
    "blank file": (_text(b"\n\r\n\n\n"), "", "no text in text.txt"),
    "folder without text": ({"f/a.png": b"x"}, "--data f", "f: no .txt, .md, .jsonl file"),
    "hidden files alone": ({"f/.git/a.txt": b"x"}, "--data f", "f: no .txt, .md, .jsonl file"),
    "pattern of nothing": (GOOD, "--data *.md", "*.md: no such file or folder"),
    "binary": (_text(TEXT.encode() + b"\0\1"), "", "text.txt, line 41: contains a NUL byte"),
    "latin-1": (_text(b"Good.\ncaf\xe9\n"), "", "line 2: not UTF-8 text (byte 0xe9)"),
    "utf-16": (_text("Hi.".encode("utf-16")), "", "this is UTF-16, not UTF-8: convert it"),
    "pdf": (_text(b"%PDF-1.7 ..."), "", "text.txt: this is a PDF"),
    "zip": (_text(b"PK\x03\x04..."), "", "text.txt: this is a zip archive"),
    "gzip by another name": (_text(gzip.compress(b"a")), "", "not named .gz: rename it"),
    "torn gzip": ({"a.txt.gz": gzip.compress(b"a" * 99)[:-9]}, "--data .", "cannot be read"),
    "other json": (
        {"a.jsonl": b'{"text": "x"}\n{"body": "x", "n": 1}\n'},
        "--data .",
        'a.jsonl, line 2: no key "text"; keys with text are body (--text-key)',
    ),
    "a key of no json": (GOOD, "--text-key body", "--text-key needs .jsonl files"),
    "no json": ({"a.jsonl": b"x\n"}, "--data .", "a.jsonl, line 1: must be a JSON object"),
    "half a character": ({"a.jsonl": b'{"text": "\\ud800"}'}, "--data .", "with a valid Unicode string"),
    "json": ({"a.json": b'[{"text": "x"}]'}, "--data a.json", "use a .jsonl with one object per line"),
    "packed json": ({"a.json.gz": gzip.compress(b"[]")}, "--data a.json.gz", "use a .jsonl with one object per line"),
    "no gzip": ({"a.txt.gz": b"not gzip"}, "--data .", "cannot be read"),
    "too short": (_text(b"Too short."), "--context 256 --vocab-size 260", "too few for windows of 256"),
    "nothing to spare": (_text(b"x"), "", "too short to hold out a part"),
    "vocabulary": (GOOD, "--vocab-size 9999", "tokens, not 9999: give more text or a smaller"),
    "tiny vocabulary": (GOOD, "--vocab-size 256", "--vocab-size must be at least 257"),
    "long context": (GOOD, "--context 99999", "give more text or --context "),
    "short context": (GOOD, "--context 1", "--context must be at least 2 tokens, not 1"),
    "no context": (GOOD, "--context 0", "argument --context: '0' is not a whole number"),
    "preset": (GOOD, "--preset smal", "unknown preset 'smal', did you mean small? available:"),
    "layout": (GOOD, "--preset toy --arch gpt", "needs one of the presets nano, small"),
    "heads": (GOOD, "--width 100 --heads 3", "is not divisible by 3 heads"),
    "memory": (GOOD, "--width 100000 --layers 99", "of memory"),
    "all held out": (GOOD, "--held-out 1", "'1' is not a number above 0 and up to 0.3"),
    "none held out": (GOOD, "--held-out 0", "'0' is not a number above 0 and up to 0.3"),
    "unseen is seen": (GOOD, "--unseen text.txt", "--unseen text.txt: 1 of its 1 documents are also in --data"),
    "no such unseen": (GOOD, "--unseen b.txt", "b.txt: no such file or folder"),
    "unseen lines": (GOOD, "--per-line --unseen text.txt", "--unseen needs running text"),
    "lines auto": (GOOD, "--per-line --preset auto", "--preset auto needs running text"),
    "stdin auto": (GOOD, "--data - --preset auto", "choose a preset"),
    "pairs and data": (GOOD, "--pairs text.txt --preset cross", "--data cannot be combined with --pairs"),
    "out is a file": (GOOD, "--out text.txt", "--out text.txt: cannot be written"),
    "out is below one": (GOOD, "--out text.txt/x", "--out text.txt/x: cannot be written"),
    "no right to write": (GOOD, "--out /proc/x", "--out /proc/x: cannot be written"),
    "no about": (GOOD, "--about about.md", "--about about.md: cannot be read"),
    "no warm-down": (GOOD, "--schedule cosine --warm-down 0.2", "--warm-down needs --schedule linear"),
    "no flag": (GOOD, "--step 2", "unrecognized arguments: --step 2"),
    "newline in a name": (GOOD, "--data 'a\nb'", r"a\nb: no such file or folder"),
}


def _exit_code(*flags: str) -> int:
    try:
        return main([*flags] if "--out" in flags else [*flags, "--out", "out"])
    except SystemExit as ended:  # argparse's wording
        return int(ended.code or 0)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that a user stands in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_and_leaves_nothing(here: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    files, flags, words = CASES[case]
    for name, content in files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(content)
    before = sorted(here.rglob("*"))
    assert _exit_code(*(INCOMPLETE.get(case) or [*DATA, *SHAPE, *STEPS, *shlex.split(flags)])) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: ") and words in errors[0], errors
    # The tokens stay, for the same command with a number changed; nothing else does.
    made = [path for path in sorted(here.rglob("*")) if path not in before]
    assert not made or (
        case in ("too short", "long context", "memory") and all(path.parts[-2:] != "lock" for path in made)
    ), made


def test_a_second_run_in_one_place_is_told_of_the_first(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "text.txt").write_text(TEXT)
    (here / "out/.training").mkdir(parents=True)
    with (here / "out/.training/lock").open("w") as lock:
        lock.write("4711\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert _exit_code(*DATA, *SHAPE, *STEPS) == 2
        assert "--out out: another run uses it (process 4711)" in capsys.readouterr().err
    assert _exit_code(*DATA, *SHAPE, *STEPS) == 0, "what a killed run left is no lock"
    assert not (here / "out/.training/lock").exists()


def test_weights_of_another_model_are_not_replaced_by_accident(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "text.txt").write_text(TEXT)
    tiny_weights(here / "out")
    before = (here / "out/model.safetensors").read_bytes()
    assert _exit_code(*DATA, *SHAPE, *STEPS) == 2
    assert "--out out: holds a model without a run" in capsys.readouterr().err
    assert (here / "out/model.safetensors").read_bytes() == before
    assert _exit_code(*DATA, *SHAPE, *STEPS, "--overwrite") == 0
    assert (here / "out/model.safetensors").read_bytes() != before


def test_a_disk_without_room_for_the_run_is_told_before_it_begins(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "text.txt").write_text(TEXT)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**9, 10**9 - 10**6, 10**6))
    assert _exit_code(*DATA, *SHAPE, *STEPS) == 2
    error = capsys.readouterr().err
    assert "MiB for snapshots and result, its disk has 976.6 KiB free" in error and error.count("\n") == 1
    assert _exit_code(*DATA, *SHAPE, *STEPS, "--dry-run") == 2
    assert "not enough disk space" in capsys.readouterr().err


def test_a_disk_that_fills_while_tokens_are_written_leaves_no_cache(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "text.txt").write_text(TEXT)
    with monkeypatch.context() as patch:

        def fail(_descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "fsync", fail)
        assert _exit_code(*DATA, *SHAPE, *STEPS) == 2
    assert "cannot be written (No space left on device)" in capsys.readouterr().err
    assert not (here / "out").exists()
    assert _exit_code(*DATA, *SHAPE, *STEPS) == 0


def test_an_unreadable_file_in_a_folder_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "f").mkdir()
    (here / "f/a.txt").write_text(TEXT)
    (here / "f/gone.txt").symlink_to("nowhere")
    assert _exit_code("--data", "f", *SHAPE, *STEPS) == 2
    assert "f/gone.txt: cannot be read (No such file or directory)" in capsys.readouterr().err
    (here / "f/gone.txt").unlink()
    (here / "f/circle.txt").symlink_to("circle.txt")
    assert _exit_code("--data", "f", *SHAPE, *STEPS) == 2
    assert "f/circle.txt: cannot be read (Too many levels of symbolic links)" in capsys.readouterr().err
